"""Individual gradients: which images pull hardest?
================================================

The gradient of a batch is a sum over its samples, and the sum hides who pulled where. One backward pass inside of
``backpack(BatchGrad())`` keeps the terms apart. Here they tell which handwritten digits a half-trained network
struggles with.
"""

# %%
# A network that has seen the 1,797 digits of scikit-learn a few times:
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

from curvopt import backpack, extend
from curvopt.extensions import BatchGrad, BatchL2Grad

torch.manual_seed(0)
images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
x, y = images.float() / 16, labels
model = extend(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
lossfunc = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(60):
    optimizer.zero_grad()
    lossfunc(model(x), y).backward()
    optimizer.step()

# %%
# Inside of the context every parameter gets ``grad_batch``, ``[N, *p]``, besides ``grad``. Its terms carry the 1/N of
# the mean, so they sum to ``grad``. If you need the norms alone, ask for ``BatchL2Grad``, which never forms the
# gradients.
optimizer.zero_grad()
with backpack(BatchGrad(), BatchL2Grad()):
    lossfunc(model(x), y).backward()
for name, p in model.named_parameters():
    print(f"{name:9} grad {list(p.grad.shape)}  grad_batch {list(p.grad_batch.shape)}")
    assert torch.allclose(p.grad_batch.sum(0), p.grad, atol=1e-5)
    assert torch.allclose(p.grad_batch.flatten(1).square().sum(1), p.batch_l2, rtol=1e-3)

# %%
# The sum of the squared norms over all parameters ranks the images. The first ones would make people hesitate, too.
norms = sum(p.batch_l2 for p in model.parameters()).sqrt() * len(x)
order = norms.argsort(descending=True)

figure, panels = plt.subplots(2, 5, figsize=(5, 2.8))
predicted = model(x).argmax(1)
for ax, i in zip(panels.flat, order[:10].tolist(), strict=True):
    ax.imshow(images[i].reshape(8, 8), cmap="gray_r")
    ax.set_title(f"a {y[i]}, taken\nfor a {predicted[i]}", fontsize=9)
    ax.axis("off")
plt.show()

# %%
# Most images pull hardly at all.
figure, axes = plt.subplots()
axes.hist(norms, bins=50, log=True)
axes.set(xlabel="norm of the individual gradient", ylabel="images")
plt.show()
