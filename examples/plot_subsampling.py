"""Cheaper curvature from a part of the batch
==========================================

Curvature changes slowly and is expensive; gradients change fast and are cheap. So take the curvature from a part of the
batch: ``subsampling`` names the samples to keep, while ``.grad`` is that of all. What is lost shows in the spectrum.
"""

# %%
# The root V of the Gauss-Newton matrix, ``G = V^T V``, has a row for each output of each sample. So the eigenvalues of
# G are those of the small Gram matrix ``V V^T`` (Dangel et al. 2022), whatever the number of parameters.
import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

from curvopt import backpack, extend
from curvopt.extensions import BatchGrad, SqrtGGNExact, SqrtGGNMC
from curvopt.utils.examples import load_one_batch_mnist

torch.manual_seed(0)
x, y = load_one_batch_mnist(128)
model = extend(
    nn.Sequential(
        nn.Conv2d(1, 4, 5, stride=3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 16),
        nn.ReLU(),
        nn.Linear(16, 10),
    )
)
lossfunc = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(10):
    optimizer.zero_grad()
    lossfunc(model(x), y).backward()
    optimizer.step()


def root(extension) -> Tensor:
    """The root for all parameters, ``[rows, P]``."""
    model.zero_grad()
    with backpack(extension):
        lossfunc(model(x), y).backward()
    return torch.cat(
        [getattr(p, extension.field).flatten(0, 1).flatten(1) for p in model.parameters()],
        dim=1,
    )


# %%
# The factor 1/N of the mean stays that of the whole batch, so what comes from K samples is scaled by N/K.
N, K = len(x), 16
some = torch.randperm(N)[:K].tolist()
roots = {
    "all 128 samples": root(SqrtGGNExact()),
    f"{K} samples": root(SqrtGGNExact(subsampling=some)) * (N / K) ** 0.5,
    "all samples, one drawn label each": root(SqrtGGNMC(mc_samples=1)),
    f"{K} samples, one drawn label each": root(SqrtGGNMC(mc_samples=1, subsampling=some))
    * (N / K) ** 0.5,
}

figure, ax = plt.subplots()
print(f"{'root of':36} {'shape':14} {'MB':>5}  largest eigenvalue")
for label, V in roots.items():
    spectrum = torch.linalg.eigvalsh(V @ V.T).flip(0).clamp(min=1e-7)
    megabytes = V.numel() * V.element_size() / 1e6
    print(f"{label:36} {str(list(V.shape)):14} {megabytes:5.1f}  {spectrum[0]:.3f}")
    ax.loglog(range(1, len(spectrum) + 1), spectrum, label=label)
ax.set(xlabel="index of the eigenvalue", ylabel="eigenvalue of the GGN", ylim=(1e-5, None))
figure.legend(loc="outside upper center", ncols=2, fontsize=8)
plt.show()

# %%
# The ten large eigenvalues, along which steps have to be short, are nearly the same for an eighth of the samples, or
# for one drawn label instead of ten exact columns; the long tail is cut off. Both savings together leave too few rows
# to tell. Individual gradients can be thinned out likewise:
with backpack(BatchGrad(subsampling=some)):
    lossfunc(model(x), y).backward()
assert all(p.grad_batch.shape[0] == K for p in model.parameters())
