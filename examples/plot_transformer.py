"""Looking into a transformer: which letters are hard
==================================================

Attention, layer norm, positions that all samples share, and an embedding that serves again as the output layer: where a
parameter is used several times, its uses add up, whether they are modules or function calls. A character model of the
Zen of Python shows which letters are hard, and where the curvature sits.
"""

# %%
# The text comes with Python.
import codecs
import contextlib
import io

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvopt import backpack, extend
from curvopt.extensions import BatchL2Grad, DiagGGNMC

with contextlib.redirect_stdout(io.StringIO()):
    import this

text = codecs.decode(this.s, "rot13")
alphabet = sorted(set(text))
characters = torch.tensor([alphabet.index(character) for character in text])
LENGTH = 32


class CharacterModel(nn.Module):
    """One causal transformer block; the output layer is the embedding, transposed."""

    def __init__(self, features: int = 32):
        super().__init__()
        self.embedding = nn.Embedding(len(alphabet), features)
        self.positions = nn.Embedding(LENGTH, features)
        self.norm = nn.LayerNorm(features)
        self.attention = nn.MultiheadAttention(features, 4, batch_first=True)
        self.mlp = nn.Sequential(
            nn.LayerNorm(features), nn.Linear(features, 64), nn.GELU(), nn.Linear(64, features)
        )
        nn.init.normal_(self.embedding.weight, std=0.3)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens) + self.positions(torch.arange(LENGTH).expand_as(tokens))
        n = self.norm(h)
        causal = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        h = h + self.attention(n, n, n, attn_mask=causal, need_weights=False)[0]
        h = h + self.mlp(h)
        return F.linear(h, self.embedding.weight).transpose(1, 2)  # [N, characters, LENGTH]


# %%
# Trained to guess the next character, from random passages:
torch.manual_seed(0)
model, lossfunc = extend(CharacterModel()), nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)


def batch(size: int) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(text) - LENGTH, (size, 1))
    passages = characters[starts + torch.arange(LENGTH + 1)]
    return passages[:, :-1], passages[:, 1:]


for _ in range(150):
    x, y = batch(16)
    optimizer.zero_grad()
    lossfunc(model(x), y).backward()
    optimizer.step()

# %%
# One backward pass over 64 passages: the norm of each passage's gradient (a sample is a whole passage), and the
# curvature of every parameter, sampled.
x, y = batch(64)
optimizer.zero_grad()
loss = lossfunc(model(x), y)
with backpack(BatchL2Grad(), DiagGGNMC()):
    loss.backward()
norms = sum(p.batch_l2 for p in model.parameters()).sqrt()
print(f"loss {loss.item():.2f}")
for rank, n in (("most", norms.argmax()), ("least", norms.argmin())):
    print(f"{rank} surprising passage:", repr("".join(alphabet[i] for i in x[n].tolist())))

# %%
# Rows of the tied matrix are characters. Their curvature adds up what they do as inputs and as outputs: letters that
# are often guessed, or could be, are those whose rows are curved.
per_character = model.embedding.weight.diag_ggn_mc.sum(1)
order = per_character.argsort(descending=True)[:20]
figure, axes = plt.subplots(2, 1, figsize=(5, 5.4), height_ratios=[1.4, 1])
axes[0].bar(
    [{" ": "␣", "\n": "↵"}.get(alphabet[i], alphabet[i]) for i in order], per_character[order]
)
axes[0].set(xlabel="character", ylabel="curvature of its embedding")
groups = {
    name: sum(p.diag_ggn_mc.sum() for p in part.parameters())
    for name, part in model.named_children()
}
axes[1].barh(list(groups), list(groups.values()), color="C1")
axes[1].set(xlabel="trace of the sampled GGN")
plt.show()
