"""Which training images are labelled wrongly?
===========================================

A tenth of 2,000 labels is wrong, and a network has learned them by heart. *Influence functions* (Koh & Liang 2017) tell
which training images harm it: had image n not been there, the loss on other, clean images would fall by about
``-gᵀ G⁻¹ g_n``, with the gradient g of these images, the gradient ``g_n`` of image n, and the curvature G. One backward
pass gives the gradients of all images and the Kronecker factors of G. This program ranks the images by that and looks
how many of the first are wrong.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

from curvopt import backpack, extend
from curvopt.extensions import KFLR, BatchGrad
from curvopt.kroneckers import inv_kfac_mat_prod
from curvopt.utils.examples import mnist_images

torch.manual_seed(0)
images, labels = mnist_images()
order = torch.randperm(len(images))[:3000]
x, y = nn.functional.avg_pool2d(images[order].float() / 255, 2).flatten(1), labels[order]
train_x, truth, clean_x, clean_y = x[:2000], y[:2000], x[2000:], y[2000:]
is_wrong = torch.rand(2000) < 0.1
train_y = torch.where(is_wrong, (truth + torch.randint(1, 10, (2000,))) % 10, truth)

# %%
# Train until the wrong labels are learned, too.
model, lossfunc = (
    nn.Sequential(nn.Linear(196, 32), nn.Tanh(), nn.Linear(32, 10)),
    nn.CrossEntropyLoss(),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
for _ in range(2500):
    chosen = torch.randint(len(train_x), (128,))
    optimizer.zero_grad()
    lossfunc(model(train_x[chosen]), train_y[chosen]).backward()
    optimizer.step()
right = (model(clean_x).argmax(1) == clean_y).float().mean()
print(f"clean images that are read correctly: {right:.1%}")

# %%
# The gradient of the clean images, then those of the training images with the curvature. For each parameter, the
# inverse of the factors is multiplied by the former, and the product with the latter is the influence.
extend(model)
clean = torch.autograd.grad(lossfunc(model(clean_x), clean_y), list(model.parameters()))
with backpack(BatchGrad(), KFLR()):
    lossfunc(model(train_x), train_y).backward()
scores = {"influence": torch.zeros(2000), "without curvature": torch.zeros(2000)}
for p, g in zip(model.parameters(), clean, strict=True):
    solve = inv_kfac_mat_prod(p.kflr, shift=0.001 ** (1 / len(p.kflr)))
    scores["influence"] -= p.grad_batch.flatten(1) @ solve(g.flatten())
    scores["without curvature"] -= p.grad_batch.flatten(1) @ g.flatten()
scores["loss"] = nn.functional.cross_entropy(model(train_x), train_y, reduction="none").detach()

# %%
# The loss of an image is what one would look at first. It is as good while a network has not yet learned the wrong
# labels; afterwards the influence finds a few more among the first images. Without curvature it finds far fewer.
figure, axes = plt.subplots()
for name, score in scores.items():
    found = is_wrong[score.argsort(descending=True)].float().cumsum(0)
    axes.plot(100 * found / is_wrong.sum(), label=name)
    share = found[399] / is_wrong.sum()
    print(f"{name:18} finds {share:.0%} of the wrong labels in the first 400 images")
axes.plot([0, 500], [0, 25], color="0.6", ls=":", label="by chance")
axes.set(xlabel="images looked at", ylabel="wrong labels found / %", xlim=(0, 500))
axes.legend(frameon=False)
plt.show()

# %%
# The most harmful images, with their labels: most are wrong.
figure, panels = plt.subplots(2, 6, figsize=(5, 2.4))
for axes, n in zip(panels.flat, scores["influence"].argsort(descending=True), strict=False):
    axes.imshow(train_x[n].view(14, 14), cmap="gray_r")
    axes.set_title(f"a {train_y[n]}?", color="C3" if is_wrong[n] else "k", fontsize=10)
    axes.set_axis_off()
plt.show()
