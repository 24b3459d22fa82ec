"""Looking into an LSTM: which gate learns what
============================================

Recurrent networks have rules, too: their matrices are linear layers whose shared positions are the time steps. Here an
LSTM reads handwritten digits row by row, and the curvature of its weights is sorted by gate in the course of training.
"""

# %%
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from curvopt import backpack, extend
from curvopt.extensions import BatchGrad, DiagGGNExact

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x = torch.from_numpy(images.reshape(-1, 8, 8)).float() / 16  # sequences of 8 rows
y = torch.from_numpy(labels)


class Reader(nn.Module):
    def __init__(self, hidden: int = 24):
        super().__init__()
        self.lstm = nn.LSTM(8, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 10)

    def forward(self, rows: Tensor) -> Tensor:
        outputs, _ = self.lstm(rows)
        return self.head(outputs[:, -1])


model, lossfunc = extend(Reader()), nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)

# %%
# Every tenth step, the exact diagonal of the Gauss-Newton matrix comes along. PyTorch stacks the four gates in the
# rows of each matrix.
gates = ("input", "forget", "cell", "output")
steps, losses, curvature = [], [], {gate: [] for gate in gates}
for step in range(121):
    chosen = torch.randint(len(x), (64,))
    optimizer.zero_grad()
    loss = lossfunc(model(x[chosen]), y[chosen])
    with backpack(*([DiagGGNExact()] if step % 10 == 0 else [])):
        loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 10 == 0:
        steps.append(step)
        for gate, rows in zip(
            gates, model.lstm.weight_hh_l0.diag_ggn_exact.chunk(4), strict=True
        ):
            curvature[gate].append(rows.sum().item())

# %%
# Individual gradients of all time steps of a sequence are summed up, as autograd does for one sequence alone.
optimizer.zero_grad()
with backpack(BatchGrad()):
    lossfunc(model(x[:5]), y[:5]).backward()
together = model.lstm.weight_hh_l0.grad_batch[2]
optimizer.zero_grad()
(lossfunc(model(x[2:3]), y[2:3]) / 5).backward()
assert torch.allclose(together, model.lstm.weight_hh_l0.grad, atol=1e-6)

figure, axes = plt.subplots(2, 1, figsize=(5, 6.6))
axes[0].plot(torch.tensor(losses).unfold(0, 10, 1).mean(1))
axes[0].set(xlabel="step", ylabel="loss (mean of 10 batches)")
for gate, traces in curvature.items():
    axes[1].semilogy(
        steps, traces, "o-", label=f"{gate} gate" if gate != "cell" else "cell proposal"
    )
axes[1].set(xlabel="step", ylabel="trace of the GGN")
axes[1].legend(fontsize=9, ncols=2)
plt.show()
