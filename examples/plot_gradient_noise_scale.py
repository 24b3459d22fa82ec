"""How large should the batch be? Gradient noise
=============================================

If the samples of a batch agree, more of them add little; if they contradict each other, more of them are worth their
cost. The *gradient noise scale* ``tr(Sigma) / |G|^2`` (McCandlish et al. 2018), the variance of individual gradients
in units of the squared gradient, is the batch size at which noise and signal are equal. One backward pass has all of
it.
"""

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

from curvopt import backpack, extend
from curvopt.extensions import SumGradSquared
from curvopt.utils.examples import load_one_batch_mnist

torch.manual_seed(0)
images, labels = load_one_batch_mnist(3000, flat=True)


def noise_scale(model: nn.Module, N: int) -> tuple[float, float]:
    """Unbiased estimates of ``tr(Sigma)`` and ``|G|^2`` from fields of a mean over N samples."""
    second_moment = N * sum(
        p.sum_grad_squared.sum() for p in model.parameters()
    )  # mean of |g_n|^2
    squared_mean = sum(p.grad.square().sum() for p in model.parameters())  # |mean of g_n|^2
    trace = (second_moment - squared_mean) * N / (N - 1)
    return trace.item(), (squared_mean - trace / N).item()


# %%
# ``.grad`` is a mean and carries 1/N, and so do the individual gradients: their squares are multiplied by N^2, one of
# which makes the sum a mean. A ratio of noisy numbers is biased, so both parts are averaged before they are divided:
# here over sixty batches, in practice over the last steps.
def estimate(model: nn.Module, batches: list[torch.Tensor]) -> float:
    parts = []
    for chosen in batches:
        model.zero_grad()
        with backpack(SumGradSquared()):
            lossfunc(model(images[chosen]), labels[chosen]).backward()
        parts.append(noise_scale(model, len(chosen)))
    trace, squared = torch.tensor(parts).mean(0)
    return (trace / squared).item()


model = extend(nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10)))
lossfunc = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
losses, by_all, by_batches = [], [], []
for _ in range(10):
    losses.append(lossfunc(model(images), labels).item())
    by_all.append(estimate(model, [torch.arange(len(images))]))
    by_batches.append(estimate(model, list(torch.randint(len(images), (60, 100)))))
    for chosen in torch.randperm(len(images)).split(100):
        optimizer.zero_grad()
        lossfunc(model(images[chosen]), labels[chosen]).backward()
        optimizer.step()

# %%
# At first all samples point the same way, and a batch of a few dozen is enough; later each wants something else, and
# averaging over hundreds pays. The scale belongs to the model and its data: small batches measure what all images do.
figure, axes = plt.subplots(2, 1, figsize=(5, 6.4))
axes[0].semilogy(losses, "o-")
axes[0].set(xlabel="epoch", ylabel="training loss")
axes[1].semilogy(by_all, "o-", label="from all images at once")
axes[1].semilogy(by_batches, "o--", label="from 60 batches of 100")
axes[1].set(xlabel="epoch", ylabel="gradient noise scale")
axes[1].legend()
plt.show()
