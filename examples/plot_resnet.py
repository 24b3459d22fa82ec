"""Looking into a residual network
===============================

Residual connections, batch norm, functional activations and poolings between the modules need nothing special:
autograd carries vectors through whatever the forward pass did. One backward pass through a small residual network
tells, layer by layer, how noisy the gradient is, how curved the loss, and what Kronecker factors look like.
"""

# %%
# A residual network as one would write it anyway:
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvopt import backpack, extend
from curvopt.extensions import KFAC, BatchL2Grad, DiagGGNExact, DiagGGNMC, Variance
from curvopt.utils.examples import load_one_batch_mnist


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = (
            nn.Conv2d(inputs, outputs, 1, stride) if inputs != outputs else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(out)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 5, stride=2, padding=2)
        self.blocks = nn.Sequential(Block(8, 8, 1), Block(8, 16, 2), Block(16, 16, 1))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(F.relu(self.stem(x))).mean((2, 3)))


# %%
# It is trained for a few steps in train mode, then looked at in eval mode: while batch norm mixes the samples there
# are no individual gradients, and asking for them is an error that says so.
torch.manual_seed(0)
images, labels = load_one_batch_mnist(1500)
model, lossfunc = extend(ResNet()), nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for chosen in torch.randperm(len(images)).split(100):
    optimizer.zero_grad()
    lossfunc(model(images[chosen]), labels[chosen]).backward()
    optimizer.step()

try:
    with backpack(BatchL2Grad()):
        lossfunc(model(images[:32]), labels[:32]).backward()
except RuntimeError as error:
    print(error)

# %%
# In eval mode everything is defined, and computed together.
model.eval()
x, y = images[:64], labels[:64]
model.zero_grad()
with backpack(BatchL2Grad(), Variance(), DiagGGNExact(), DiagGGNMC(), KFAC()):
    lossfunc(model(x), y).backward()

# %%
# Which layers have which share of the curvature, and how well do 64 images agree on their gradients?
weights = {name: p for name, p in model.named_parameters() if p.dim() > 1}
print(f"{'weight':24} {'Kronecker factors':24} trace of the GGN, and by one sample")
for name, p in weights.items():
    factors = " x ".join(str(len(factor)) for factor in p.kfac)
    print(f"{name:24} {factors:24} {p.diag_ggn_exact.sum():.3f}  {p.diag_ggn_mc.sum():.3f}")

figure, axes = plt.subplots(2, 1, figsize=(5, 6))
names = [name.removesuffix(".weight") for name in weights]
noise = [len(x) ** 2 * p.variance.sum() / p.grad.square().sum() for p in weights.values()]
curvature = [p.diag_ggn_exact.mean() for p in weights.values()]
axes[0].barh(names, curvature)
axes[0].set(xlabel="mean curvature of a weight", xscale="log")
axes[1].barh(names, noise, color="C1")
axes[1].set(xlabel="variance / squared gradient")
for ax in axes:
    ax.invert_yaxis()
plt.show()
