"""Private training: no single image can dominate
==============================================

Differentially private SGD (Abadi et al. 2016) clips the gradient of every *sample* to a norm and adds noise to the
sum, so that the model learns next to nothing about any one of them. For that one needs every sample's gradient, or, at
a fraction of the memory, only its norm.
"""

# %%
# ``BatchL2Grad`` gives the squared norm of each sample's gradient without forming the gradients. With weights
# ``min(1, clip / norm_n)`` a second backward pass of the weighted loss *is* the sum of clipped gradients.
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from curvopt import backpack, extend
from curvopt.extensions import BatchGrad, BatchL2Grad

images, labels = load_digits(return_X_y=True)
x, y = torch.from_numpy(images).float() / 16, torch.from_numpy(labels)
train_x, train_y, test_x, test_y = x[:1500], y[:1500], x[1500:], y[1500:]


def clipped_gradients(
    model: nn.Module, x: Tensor, y: Tensor, clip: float
) -> tuple[list[Tensor], Tensor]:
    """Sum of the clipped individual gradients, and their norms before clipping."""
    losses = nn.functional.cross_entropy(model(x), y, reduction="none")
    with backpack(BatchL2Grad()):
        losses.sum().backward(retain_graph=True)
    norms = sum(p.batch_l2 for p in model.parameters()).sqrt()
    weights = (clip / norms).clamp(max=1)
    return list(torch.autograd.grad((weights * losses).sum(), list(model.parameters()))), norms


# %%
# The same with the individual gradients in hand:
torch.manual_seed(0)
model = extend(nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)))
fast, norms = clipped_gradients(model, x[:100], y[:100], clip=1.0)
with backpack(BatchGrad()):
    nn.functional.cross_entropy(model(x[:100]), y[:100], reduction="sum").backward()
for p, g in zip(model.parameters(), fast, strict=True):
    by_hand = torch.einsum("n,n...->...", (1.0 / norms).clamp(max=1), p.grad_batch)
    assert torch.allclose(by_hand, g, atol=1e-5)


# %%
# The noise is proportional to the clipping norm, the dashed line. (Which privacy a noise multiplier buys, given the
# batch size and the number of steps, is the business of an accountant, which this page has none of.)
def train(noise: float, clip: float = 1.0, epochs: int = 12) -> tuple[list[float], Tensor]:
    torch.manual_seed(0)
    model = extend(nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    accuracies = []
    for _ in range(epochs):
        for chosen in torch.randperm(len(train_x)).split(250):
            gradients, norms = clipped_gradients(model, train_x[chosen], train_y[chosen], clip)
            for p, g in zip(model.parameters(), gradients, strict=True):
                p.grad = (g + noise * clip * torch.randn_like(g)) / len(chosen)
            optimizer.step()
        accuracies.append(100 * (model(test_x).argmax(1) == test_y).float().mean().item())
    return accuracies, norms


figure, axes = plt.subplots(2, 1, figsize=(5, 6.8))
for noise in (0.0, 1.0, 4.0, 16.0):
    accuracies, norms = train(noise)
    axes[0].plot(accuracies, label=f"noise {noise:g}")
    if noise in (0.0, 16.0):
        axes[1].hist(norms, bins=30, alpha=0.6, label=f"noise {noise:g}")
axes[0].set(xlabel="epoch", ylabel="accuracy on held-out images, %")
axes[0].legend(ncols=2)
axes[1].axvline(1.0, color="k", linestyle="--")
axes[1].set(xlabel="norm of individual gradients", ylabel="images of the last batch")
axes[1].legend()
plt.show()
