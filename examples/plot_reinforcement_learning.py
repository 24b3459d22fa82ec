"""Balancing a pole: reinforcement learning with curvature
=======================================================

A cart has to balance a pole by pushing left or right, and earns a point for each step until the pole falls. An
*actor-critic* learns this with two networks: the actor gives the probabilities of the pushes, the critic guesses how
many points will follow. ACKTR (Wu et al. 2017) trains both by KFAC, with steps that are bounded by how much they change
the predictions. This page does the like with ``KFACSGD``.
"""

# %%
# The physics of the pole (Barto et al. 1983), for 128 carts at once. An episode ends when the pole leans too far or the
# cart leaves the track, and after 500 steps at the latest.
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvopt.optim import KFACSGD

CARTS, STEPS, UPDATES, DISCOUNT, MIX, LONGEST = 128, 16, 60, 0.99, 0.95, 500


def push(state: Tensor, right: Tensor) -> Tensor:
    """The state ``[carts, 4]`` (place, speed, angle, its speed) 0.02 seconds after a push."""
    x, v, angle, turn = state.unbind(1)
    sin, cos = angle.sin(), angle.cos()
    pull = (20 * right - 10 + 0.05 * turn**2 * sin) / 1.1
    turning = (9.8 * sin - cos * pull) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
    moving = pull - 0.05 * turning * cos / 1.1
    return state + 0.02 * torch.stack([v, moving, turn, turning], 1)


def fallen(state: Tensor) -> Tensor:
    return (state[:, 0].abs() > 2.4) | (state[:, 2].abs() > 0.21)


def start() -> Tensor:
    return torch.rand(CARTS, 4) * 0.1 - 0.05


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = (
            nn.Sequential(
                nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
            )
            for _ in range(2)
        )

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Log-odds of a push to the right, and the points that will follow."""
        return self.actor(state)[..., 0], self.critic(state)[..., 0]


# %%
# An update uses 16 steps of all carts. The *advantage* says how much better a push turned out than the critic thought
# (generalized advantage estimation, Schulman et al. 2016). The actor's loss makes pushes with an advantage likelier,
# and the critic's is a squared error.


def train(make, seed: int) -> list[float]:
    """Mean length of the last episode of each cart, after every update."""
    torch.manual_seed(seed)
    model = ActorCritic()
    optimizer = make(model)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, UPDATES)
    state, age, last, curve = start(), torch.zeros(CARTS), torch.full((CARTS,), 20.0), []
    for _ in range(UPDATES):
        record = []
        with torch.no_grad():
            for _ in range(STEPS):
                right = (torch.rand(CARTS) < model.actor(state)[:, 0].sigmoid()).float()
                after, age = push(state, right), age + 1
                fell = fallen(after)
                over = fell | (age >= LONGEST)
                record.append((state, right, after, fell, over))
                last, age = torch.where(over, age, last), torch.where(over, 0, age)
                state = torch.where(over[:, None], start(), after)
            states, pushes, afters, fell, over = map(torch.stack, zip(*record, strict=True))
            before = model.critic(states)[..., 0]
            surprise = (
                torch.where(fell, 0, 1 + DISCOUNT * model.critic(afters)[..., 0]) - before
            )
            advantage, advantages = torch.zeros(CARTS), []
            for s, o in zip(surprise.flip(0), over.flip(0), strict=True):
                advantage = s + DISCOUNT * MIX * ~o * advantage
                advantages.insert(0, advantage)
            advantage = torch.stack(advantages)
            points, weight = (
                (advantage + before).flatten(),
                (advantage - advantage.mean()) / advantage.std(),
            )
        odds, guess = model(states.flatten(0, 1))
        surprisal = F.binary_cross_entropy_with_logits(odds, pushes.flatten(), reduction="none")
        loss = (surprisal * weight.flatten()).mean() + 0.05 * F.mse_loss(guess, points)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        curve.append(last.mean().item())
    return curve


# %%
# ``KFACSGD`` takes the model in place of its parameters; the training loop is that of AdamW. The settings are the
# defaults, but for the learning rate, which is higher as the network is small and the rate falls to zero. AdamW gets
# two learning rates.
runs = {
    "AdamW, lr 0.003": ("C1", lambda model: torch.optim.AdamW(model.parameters(), lr=0.003)),
    "AdamW, lr 0.03": ("C3", lambda model: torch.optim.AdamW(model.parameters(), lr=0.03)),
    "KFACSGD": ("C0", lambda model: KFACSGD(model, lr=0.3)),
}
figure, ax = plt.subplots(figsize=(5, 4))
thousands = torch.arange(1, UPDATES + 1) * CARTS * STEPS / 1000
for height, (label, (color, make)) in zip((0.93, 0.86, 0.79), runs.items(), strict=True):
    curves = torch.tensor([train(make, seed) for seed in range(3)])
    ax.plot(thousands, curves.T, color=color, linewidth=0.4)
    ax.plot(thousands, curves.mean(0), color=color, linewidth=2)
    ax.text(0.03, height, label, color=color, weight="bold", transform=ax.transAxes)
    last = curves[:, -1]
    print(f"{label:15} at the end {last.mean():.0f}, three seeds {last.round().int().tolist()}")
ax.set(xlabel="steps of a cart, in thousands", ylabel="steps until the pole falls")
plt.show()

# %%
# Thick lines are means, thin ones single runs. ``KFACSGD`` ends above the lower rate of AdamW, and about level with the
# higher one, whose runs end further apart. Three runs say little about smaller differences.
