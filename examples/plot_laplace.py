"""How sure is the network? Laplace approximation
==============================================

A trained network is surer of itself than it should be. Curvature says how sharply the data pin its weights down: the
Laplace approximation takes the weights as Gaussian, with the inverse curvature as covariance (MacKay 1992; Ritter et
al. 2018 with Kronecker factors). For the last layer it fits on a page.
"""

# %%
# A classifier trained to the end on few digits, too few to be as sure as it is: the mean probability of its guesses on
# unseen images is far above the share of right ones.
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from curvopt import backpack, extend
from curvopt.extensions import KFLR

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x, y = torch.from_numpy(images).float() / 16, torch.from_numpy(labels)
train, validation, test = slice(0, 400), slice(400, 1000), slice(1000, None)
body = nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 30), nn.ReLU())
head = extend(nn.Linear(30, 10, bias=False))
optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()], lr=0.01)
for _ in range(300):
    optimizer.zero_grad()
    nn.functional.cross_entropy(head(body(x[train])), y[train]).backward()
    optimizer.step()

# %%
# The posterior's precision is the curvature of the summed loss plus that of the prior, ``B ⊗ A + prior I``. The exact
# Kronecker factors come from one backward pass; in their eigenbases the sum is diagonal.
lossfunc = nn.CrossEntropyLoss(reduction="sum")
with backpack(KFLR()):
    lossfunc(head(body(x[train])), y[train]).backward()
(b, Q), (a, U) = (torch.linalg.eigh(factor) for factor in head.weight.kflr)


@torch.no_grad()
def alone(x: Tensor) -> Tensor:
    """Probabilities of the network with its trained weights."""
    return head(body(x)).softmax(1)


@torch.no_grad()
def laplace(x: Tensor, prior: float) -> Tensor:
    """Probabilities averaged over 200 draws of the last layer's weights."""
    precision = torch.outer(b.clamp(min=0), a.clamp(min=0)) + prior
    shifts = Q @ (torch.randn(200, *precision.shape) / precision.sqrt()) @ U.T
    features = body(x)
    return (head(features) + features @ shifts.mT).softmax(2).mean(0)


def log_loss(probabilities: Tensor, y: Tensor) -> float:
    return nn.functional.nll_loss(probabilities.log(), y).item()


# %%
# How strong the prior should be is settled on one part of the unseen images, and judged on the other.
priors = torch.logspace(0, 3, 13).tolist()
by_prior = [log_loss(laplace(x[validation], prior), y[validation]) for prior in priors]
prior = priors[min(range(len(priors)), key=by_prior.__getitem__)]

# %%
# The upper panel shows the choice. The lower one shows test images in six groups by how sure the prediction is, and the
# share of right ones in each. On the diagonal a probability means what it says. The network alone is below it, so it
# promises too much; the approximation is above, on the careful side.
figure, axes = plt.subplots(2, 1, figsize=(5, 7))
axes[0].semilogx(priors, by_prior, "o-", color="C1", label="Laplace approximation")
axes[0].axhline(
    log_loss(alone(x[validation]), y[validation]), color="C0", label="the network alone"
)
axes[0].set(xlabel="precision of the prior", ylabel="log loss on validation images")
axes[0].set_ylim(top=1.4)
axes[0].legend(loc="upper center")

print(f"{'':24} log loss  accuracy  mean confidence")
for label, p in (
    ("the network alone", alone(x[test])),
    (f"Laplace, prior {prior:.0f}", laplace(x[test], prior)),
):
    confidence, guess = p.max(1)
    right = (guess == y[test]).float()
    print(
        f"{label:24} {log_loss(p, y[test]):8.3f} {right.mean():9.3f} {confidence.mean():16.3f}"
    )
    parts = confidence.argsort().chunk(6)
    axes[1].plot(
        [confidence[i].mean() for i in parts],
        [right[i].mean() for i in parts],
        "o-",
        label=label,
    )
axes[1].plot([0.3, 1], [0.3, 1], "k--", linewidth=1)
axes[1].set(xlabel="probability of the likeliest digit", ylabel="share of right guesses")
axes[1].legend(loc="lower right")
plt.show()
