"""How curved is the loss? Three ways to the trace
===============================================

How curved is the loss altogether? The trace of the Hessian says it in one number. There are three ways to it: add up
the exact diagonal, probe the blocks with random vectors (Hutchinson 1989), or probe the Hessian of all parameters at
once.
"""

# %%
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

from curvopt import backpack, extend
from curvopt.extensions import HMP, DiagGGNMC, DiagHessian
from curvopt.hessianfree import hessian_vector_product

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x, y = torch.from_numpy(images[:200]).float() / 16, torch.from_numpy(labels[:200])
model = extend(nn.Sequential(nn.Linear(64, 24), nn.Sigmoid(), nn.Linear(24, 10)))
lossfunc = nn.CrossEntropyLoss()
params = list(model.parameters())

# %%
# **Exactly**, and in the same backward pass products with the blocks of the Hessian, which work when the graph is gone:
with backpack(DiagHessian(), HMP()):
    lossfunc(model(x), y).backward()
exact = sum(p.diag_h.sum() for p in params).item()

# %%
# **By probing**: ``v^T H v`` has the trace as its mean for v of random signs. Blocks and the whole matrix have the same
# trace, but not the same variance: what stands off the diagonal blocks is noise to the whole, and invisible to the
# blocks.
PROBES = 200
signs = [torch.randint(2, (PROBES, *p.shape)) * 2.0 - 1 for p in params]
by_blocks = sum((v * p.hmp(v)).flatten(1).sum(1) for p, v in zip(params, signs, strict=True))

loss = lossfunc(model(x), y)
whole = []
for probe in zip(*signs, strict=True):
    products = hessian_vector_product(loss, params, probe)
    whole.append(sum((v * Hv).sum() for v, Hv in zip(probe, products, strict=True)))
whole = torch.stack(whole)

# %%
# **By sampling labels**: the trace of the Gauss-Newton matrix, from as many draws. It is another matrix, but close to
# the Hessian as long as the residuals cancel, as they do in a network that has not been trained.
draws = []
for _ in range(PROBES):
    with backpack(DiagGGNMC()):
        lossfunc(model(x), y).backward()
    draws.append(sum(p.diag_ggn_mc.sum() for p in params))
draws = torch.stack(draws)

# %%
# A line for each estimator, with one standard deviation of a mean over so many probes:
print(f"trace of the Hessian {exact:.3f}")
figure, ax = plt.subplots()
count = torch.arange(1, PROBES + 1)
for label, values in {
    "blocks (HMP)": by_blocks,
    "whole Hessian": whole,
    "GGN, sampled labels": draws,
}.items():
    values = values.detach()
    mean, spread = values.cumsum(0) / count, values.std() / count**0.5
    ax.plot(count, mean, label=f"{label}: {values.mean():.3f} ± {spread[-1]:.3f}")
    ax.fill_between(count, mean - spread, mean + spread, alpha=0.2)
ax.axhline(exact, color="k", linestyle="--", label="exact (DiagHessian)")
ax.set(xlabel="probes", ylabel="estimate of the trace", xscale="log")
ax.legend(fontsize=9)
plt.show()
