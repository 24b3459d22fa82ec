"""How outputs depend on weights: Jacobians
========================================

``BatchGrad`` does not care what is differentiated. Sum one output over the batch, and the individual gradients are a
row of every sample's Jacobian; keep the graph, and C backward passes give the whole Jacobian of C outputs, for all
samples. Its inner products are the neural tangent kernel (Jacot et al. 2018).
"""

# %%
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from curvopt import backpack, extend
from curvopt.extensions import BatchGrad

images, labels = load_digits(return_X_y=True)
images, labels = torch.from_numpy(images).float() / 16, torch.from_numpy(labels)
first = torch.cat([(labels == digit).nonzero()[:8, 0] for digit in range(10)])
x, y = images[first], labels[first]  # eight of each digit, sorted
torch.manual_seed(0)
model = extend(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)))


def jacobian(model: nn.Module, x: Tensor) -> Tensor:
    """Derivatives ``[N, C, P]`` of all outputs with respect to all parameters."""
    output = model(x)
    rows = []
    for c in range(output.shape[1]):
        with backpack(BatchGrad()):
            output[:, c].sum().backward(retain_graph=c + 1 < output.shape[1])
        rows.append(torch.cat([p.grad_batch.flatten(1) for p in model.parameters()], dim=1))
    return torch.stack(rows, dim=1)


# %%
# The same by ``torch.func``, to be sure:
J = jacobian(model, x)
parameters = dict(model.named_parameters())
by_sample = torch.func.vmap(
    torch.func.jacrev(lambda p, x: torch.func.functional_call(model, p, (x,))),
    in_dims=(None, 0),
)(parameters, x)
assert torch.allclose(
    J, torch.cat([value.flatten(2) for value in by_sample.values()], dim=2), atol=1e-5
)
print("Jacobian of", list(J.shape), "samples x outputs x parameters")


# %%
# The kernel between two images says how much a gradient step on one changes the outputs for the other. Before training
# it only knows which images look alike; after training it has learned which of them belong together.
def kernel(model: nn.Module) -> Tensor:
    J = jacobian(model, x)
    K = torch.einsum("ncp,mcp->nm", J, J)
    scale = K.diagonal().sqrt()
    return K / torch.outer(scale, scale)


before = kernel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(100):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
after = kernel(model)

same = y[:, None] == y[None]
figure, axes = plt.subplots(2, 1, figsize=(5, 7.6))
for ax, K, when in ((axes[0], before, "before"), (axes[1], after, "after")):
    drawn = ax.imshow(K, vmin=0, vmax=1, cmap="viridis")
    contrast = K[same].mean() / K[~same].mean()
    ax.set_title(f"{when} training: same digit {contrast:.2f}x", fontsize=10)
    ax.set(xlabel="digit", ylabel="digit")
    ax.set_xticks(range(4, 80, 8), range(10))
    ax.set_yticks(range(4, 80, 8), range(10))
figure.colorbar(drawn, ax=axes, label="normalised kernel of two images")
plt.show()
