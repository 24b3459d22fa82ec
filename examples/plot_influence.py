"""Which training images does a prediction rest on? Influence functions
====================================================================

A network reads a digit wrongly. Which of its training images are to blame? One could leave each out in turn and train
again. *Influence functions* (Koh & Liang 2017) predict the outcome without any training: they need the gradients of
single images and the inverse of the curvature matrix. For large networks Grosse et al. (2023) approximate that matrix
by *EK-FAC*. This page computes such predictions, and then trains again to see how good they are.
"""

# %%
# A small network on 400 images of digits. Weight decay makes the best weights well defined, and L-BFGS, an optimizer
# for small smooth problems, finds them almost exactly. ``keep`` holds 1 for each image that counts and 0 for one that
# is left out.
import copy

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from curvopt import backpack, extend
from curvopt.extensions import KFLR, BatchGrad, EigenDiagonal, SqrtGGNExact

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
shuffled = torch.randperm(len(images))
x, y = torch.from_numpy(images)[shuffled] / 16, torch.from_numpy(labels)[shuffled]
N, DECAY = 400, 0.01
train_x, train_y, test_x, test_y = x[:N], y[:N], x[N:], y[N:]


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def train(model: nn.Module, keep: Tensor) -> nn.Module:
    optimizer = torch.optim.LBFGS(
        model.parameters(),
        max_iter=1000,
        tolerance_grad=1e-6,
        history_size=50,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        penalty = DECAY / 2 * sum(p.square().sum() for p in model.parameters())
        loss = keep @ losses(model, train_x, train_y) / N + penalty
        loss.backward()
        return loss

    optimizer.step(closure)
    return model


model = train(nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10)), torch.ones(N))
right = (model(test_x).argmax(1) == test_y).double().mean()
print(f"{right:.1%} of the test images are read correctly")

# %%
# We ask about 25 of the 100 test images with the largest losses. If training image n is left out, the loss of a test
# image should rise by about ``g_testᵀ (G + decay I)⁻¹ g_n / N``: ``g`` are gradients of single losses, and G is the
# Gauss-Newton matrix, the curvature of the training loss. One backward pass gives all gradients of single training
# images, the Kronecker factors of each block of G, and a root of G, from which a network this small can have all of G.
trained = copy.deepcopy(model)  # the copy is trained again below; the original is extended
with torch.no_grad():
    hardest = losses(model, test_x, test_y).argsort(descending=True)[:100]
asked = hardest[torch.randperm(100)[:25]]
extend(model)
parameters = list(model.parameters())
with backpack(BatchGrad(), KFLR(), SqrtGGNExact()):
    losses(model, train_x, train_y).sum().backward()
of_train, factors = [p.grad_batch for p in parameters], [p.kflr for p in parameters]
root = torch.cat([p.sqrt_ggn_exact.flatten(2).flatten(0, 1) for p in parameters], 1)
with backpack(BatchGrad()):
    losses(model, test_x[asked], test_y[asked]).sum().backward()
of_test = [p.grad_batch for p in parameters]

# %%
# KFAC takes each layer's block of G as a Kronecker product of two small matrices (a bias has one). Its eigenvectors are
# products of theirs, so the inverse costs next to nothing. EK-FAC keeps the eigenvectors, and replaces the eigenvalues
# by the curvature that G really has in these directions: ``EigenDiagonal``.
eigen = [[torch.linalg.eigh(factor) for factor in of_p] for of_p in factors]
bases = {p: [vectors for _, vectors in of_p] for p, of_p in zip(parameters, eigen, strict=True)}
with backpack(EigenDiagonal(bases, KFLR().columns)):
    losses(model, train_x, train_y).sum().backward()


def rotated(gradients: Tensor, basis: list[Tensor]) -> Tensor:
    """Gradients ``[N, *p]`` in the coordinates of the eigenvectors, ``[N, P]``."""
    left, *right = basis
    return (left.T @ gradients @ right[0]).flatten(1) if right else gradients @ left


def by_eigenvalues(eigenvalues: list[Tensor]) -> Tensor:
    """Predicted rise of the loss, ``[test images, training images]``, parameter by parameter."""
    total = torch.zeros(len(asked), N)
    for p, test, train, values in zip(parameters, of_test, of_train, eigenvalues, strict=True):
        total += (
            (rotated(test, bases[p]) / (values / N + DECAY)) @ rotated(train, bases[p]).T / N
        )
    return total


products = [v[0][0] if len(v) == 1 else torch.outer(v[0][0], v[1][0]).flatten() for v in eigen]
test, train_ = (torch.cat([g.flatten(1) for g in each], 1) for each in (of_test, of_train))
dense = root.T @ root / N + DECAY * torch.eye(root.shape[1])
blocks, sizes = torch.zeros_like(dense), [p.numel() for p in parameters]
for end, size in zip(torch.tensor(sizes).cumsum(0), sizes, strict=True):
    block = slice(end - size, end)
    blocks[block, block] = dense[block, block]
predicted = {
    "no curvature": test @ train_.T / N,
    "KFAC": by_eigenvalues(products),
    "EK-FAC": by_eigenvalues([p.eigen_diagonal for p in parameters]),
    "blocks of G": test @ torch.linalg.solve(blocks, train_.T) / N,
    "all of G": test @ torch.linalg.solve(dense, train_.T) / N,
}

# %%
# A test image that is read wrongly, and the training images that EK-FAC finds most influential. Without those of the
# first row its loss would rise most; without those of the second row it would fall most.
guesses = model(test_x[asked]).argmax(1)
wrong = (guesses != test_y[asked]).nonzero()[0, 0]
order = predicted["EK-FAC"][wrong].argsort(descending=True)
figure, axes = plt.subplots(2, 4, figsize=(5, 3.2))
for row, chosen, what in ((0, order[:3], "helps"), (1, order.flip(0)[:3], "harms")):
    for ax, n in zip(axes[row, 1:], chosen, strict=True):
        ax.imshow(train_x[n].reshape(8, 8), cmap="gray_r")
        ax.set_title(f"a {train_y[n]} {what}", fontsize=10)
axes[0, 0].imshow(test_x[asked[wrong]].reshape(8, 8), cmap="gray_r")
axes[0, 0].set_title(f"a {test_y[asked[wrong]]}, read\nas a {guesses[wrong]}", fontsize=10)
for ax in axes.flat:
    ax.axis("off")
plt.show()

# %%
# Now the truth: leave out 30 training images, one at a time, and go on training from the weights at hand until the
# optimum is found again. (From other initial weights the network ends elsewhere, and the difference is mostly chance;
# Bae et al. 2022 discuss what influence functions answer.)
left_out = torch.randperm(N)[:30]
with torch.no_grad():
    before = losses(trained, test_x[asked], test_y[asked])
measured = []
for n in left_out:
    again = train(copy.deepcopy(trained), torch.ones(N).index_fill(0, n, 0))
    measured.append((losses(again, test_x[asked], test_y[asked]) - before).detach())
measured = torch.stack(measured, 1)

# %%
# Each dot of the upper picture is a pair of a test image and a training image that was left out; on the dashed line the
# prediction is exact. The bars are the correlation of predicted and measured rises, for each test image on its own and
# then averaged: 1 is perfect, 0 is useless.
#
# Curvature makes the predictions much better. EK-FAC ranks images no better than KFAC here, and both predict too large
# changes. The exact blocks gain a little, and all of G gains more, as it knows how layers act together; but it is a
# matrix of all parameters by all parameters, for which large networks have no room.


def correlation(predicted: Tensor) -> float:
    pairs = zip(predicted[:, left_out], measured, strict=True)
    return (
        torch.stack([torch.corrcoef(torch.stack(pair))[0, 1] for pair in pairs]).mean().item()
    )


score = {name: correlation(values) for name, values in predicted.items()}
figure, axes = plt.subplots(2, 1, figsize=(5, 6.4), height_ratios=[1.6, 1])
for name, color in (("EK-FAC", "C0"), ("all of G", "C1")):
    axes[0].plot(
        predicted[name][:, left_out].flatten(),
        measured.flatten(),
        ".",
        color=color,
        markersize=4,
    )
for name, color, height in (("EK-FAC", "C0", 0.92), ("all of G", "C1", 0.84)):
    axes[0].text(0.03, height, name, color=color, weight="bold", transform=axes[0].transAxes)
axes[0].axline((0, 0), slope=1, color="k", linestyle="--", linewidth=1)
axes[0].set(xlabel="predicted rise of a test image's loss", ylabel="rise after training again")
bars = axes[1].barh(list(score), list(score.values()), color=["0.6", "C2", "C0", "C4", "C1"])
axes[1].bar_label(bars, fmt=" %.2f")
axes[1].set(xlabel="correlation with training again", xlim=(0, 1.1))
axes[1].invert_yaxis()
plt.show()
