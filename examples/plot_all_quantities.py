"""All quantities from one backward pass
=====================================

One backward pass can carry every extension. Extensions that pull back the same vectors share them: the exact quantities
together cost one sweep, and so do the sampled ones.
"""

# %%
# A small network on the digits of scikit-learn, cut down to 8x8 = 64 inputs each:
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

from curvopt import backpack, extend
from curvopt.extensions import (
    GGNMP,
    HMP,
    KFAC,
    KFLR,
    KFRA,
    PCHMP,
    BatchDiagGGNExact,
    BatchDiagGGNMC,
    BatchDiagHessian,
    BatchGrad,
    BatchL2Grad,
    DiagGGNExact,
    DiagGGNMC,
    DiagHessian,
    SqrtGGNExact,
    SqrtGGNMC,
    SumGradSquared,
    Variance,
)

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x, y = torch.from_numpy(images[:100]).float() / 16, torch.from_numpy(labels[:100])
model = extend(nn.Sequential(nn.Linear(64, 16), nn.Sigmoid(), nn.Linear(16, 10)))
lossfunc = nn.CrossEntropyLoss()
extensions = [
    BatchGrad(),
    BatchL2Grad(),
    SumGradSquared(),
    Variance(),
    DiagGGNExact(),
    DiagGGNMC(),
    BatchDiagGGNExact(),
    BatchDiagGGNMC(),
    DiagHessian(),
    BatchDiagHessian(),
    SqrtGGNExact(),
    SqrtGGNMC(mc_samples=1),
    KFAC(),
    KFLR(),
    KFRA(),
    GGNMP(),
    HMP(),
    PCHMP(),
]
with backpack(*extensions):
    lossfunc(model(x), y).backward()

# %%
# What the weight of the first layer, ``[16, 64]``, has now:
weight = model[0].weight
print(f"{'extension':18} {'field':22} content")
for extension in extensions:
    value = getattr(weight, extension.field)
    if isinstance(value, torch.Tensor):
        content = list(value.shape)
    elif isinstance(value, list):
        content = [list(factor.shape) for factor in value]
    else:
        content = "[V, 16, 64] -> [V, 16, 64]"
    print(f"{type(extension).__name__:18} {extension.field:22} {content}")

# %%
# The rows of the diagonals are pictures of what each unit is sensitive to; here is the unit on which they disagree
# most. The border is white in all of them: pixels that are never inked have neither gradient nor curvature. One
# sampled label for each image gives nearly the picture of ten exact columns. The Hessian's has blue, negative entries,
# which the Gauss-Newton matrix never has.
unit = (weight.diag_h - weight.diag_ggn_exact).square().sum(1).argmax()
pictures = {
    "sum_grad_squared": weight.sum_grad_squared,
    "diag_ggn_exact": weight.diag_ggn_exact,
    "diag_ggn_mc": weight.diag_ggn_mc,
    "KFLR's diagonal": torch.outer(*(factor.diagonal() for factor in weight.kflr)),
    "diag_h": weight.diag_h,
}
figure, axes = plt.subplots(3, 2, figsize=(5, 7))
for ax, (title, diagonal) in zip(axes.flat, pictures.items(), strict=False):
    picture = diagonal[unit].detach().reshape(8, 8)
    image = ax.imshow(picture / picture.abs().max(), cmap="RdBu_r", vmin=-1, vmax=1)
    ax.set_title(title, fontsize=10)
for ax in axes.flat:
    ax.axis("off")
figure.colorbar(image, ax=axes, label="entry / largest entry", shrink=0.5)
plt.show()
