"""Training with curvature: KFAC beside SGD
========================================

``KFACSGD`` is ``torch.optim.SGD`` on gradients that were multiplied by the inverse of a Kronecker-factored curvature
matrix. The training loop does not change: the optimizer takes the model, whose backward passes it watches.
"""

# %%
# MNIST, 2,000 images of it, and a small convolutional network:
import matplotlib.pyplot as plt
import torch
from torch import nn

from curvopt.optim import KFACSGD
from curvopt.utils.examples import load_one_batch_mnist

torch.manual_seed(0)
images, labels = load_one_batch_mnist(2000)


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(400, 10),
    )


def train(
    model: nn.Module, lossfunc: nn.Module, optimizer: torch.optim.Optimizer, epochs: int = 4
) -> list[float]:
    losses = []
    for _ in range(epochs):
        for chosen in torch.randperm(len(images)).split(100):
            optimizer.zero_grad()
            loss = lossfunc(model(images[chosen]), labels[chosen])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


# %%
# SGD with momentum at a few learning rates, and KFACSGD with its defaults.
curves = {}
for lr in (0.01, 0.03, 0.1):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    curves[f"SGD, lr {lr:g}"] = train(model, nn.CrossEntropyLoss(), optimizer)
model, lossfunc = make_model(), nn.CrossEntropyLoss()
optimizer = KFACSGD(model)
curves["KFACSGD"] = train(model, lossfunc, optimizer)

# %%
# The optimizer can say what it does: which kind of curvature stands before the gradient of each parameter.
for name, kind in optimizer.coverage().items():
    print(f"{name:10} {kind}")

figure, ax = plt.subplots()
for label, losses in curves.items():
    smooth = torch.tensor(losses).unfold(0, 5, 1).mean(1)
    ax.semilogy(smooth, label=label, linewidth=2 if "KFAC" in label else 1)
ax.set(xlabel="step", ylabel="loss (mean of 5 batches)")
ax.legend()
plt.show()
