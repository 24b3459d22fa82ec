"""Everyday losses and training loops, for `benchmarks.workflows` and the tests.

Each workflow is a loop as one writes it with AdamW, on a tiny network and made-up data. It is given a function that
makes an optimizer for a module, and yields a number after each step that should fall: the loss, or minus the reward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, distributions, nn

Make = Callable[[nn.Module], torch.optim.Optimizer]
Workflow = Callable[[Make], Iterator[float]]
WORKFLOWS: dict[str, Workflow] = {}
N = 64


def workflow(name: str) -> Callable[[Workflow], Workflow]:
    """Add a workflow to the list."""

    def add(run: Workflow) -> Workflow:
        WORKFLOWS[name] = run
        return run

    return add


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, o in zip(sizes, sizes[1:], strict=False):
        layers += [nn.Linear(i, o), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def step(optimizer: torch.optim.Optimizer, loss: Tensor) -> float:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def classes(inputs: int = 8, number: int = 4) -> tuple[Tensor, Tensor]:
    x = torch.randn(N, inputs)
    return x, (x @ torch.randn(inputs, number)).argmax(1)


def falls(value: Callable[[], float]) -> Iterator[float]:
    """How much lower a number is than at first: what is learned against depends on the optimizer, too."""
    first = value()
    while True:
        yield value() - first


def minimise(make: Make, model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> Iterator[float]:
    optimizer = make(model)
    while True:
        yield step(optimizer, loss(model))


# ----------------------------------------------------------------------------------------------- reinforcement learning


class ActorCritic(nn.Module):
    """A policy and a value function on one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.policy, self.value = (
            nn.Sequential(nn.Linear(8, 32), nn.Tanh()),
            nn.Linear(32, 4),
            nn.Linear(32, 1),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(x)
        return self.policy(h), self.value(h)[:, 0]


@workflow("A2C, policy and value on one trunk")
def a2c(make: Make) -> Iterator[float]:
    model, (x, best) = ActorCritic(), classes()
    optimizer = make(model)
    while True:
        logits, value = model(x)
        policy = distributions.Categorical(logits=logits)
        action = policy.sample()
        reward = (action == best).float()
        advantage = (reward - value).detach()
        loss = -(policy.log_prob(action) * advantage).mean() + 0.5 * (value - reward).square().mean()
        step(optimizer, loss - 0.01 * policy.entropy().mean())
        yield -logits.softmax(1).gather(1, best[:, None]).mean().item()


@workflow("PPO, clipped, several epochs a batch")
def ppo(make: Make) -> Iterator[float]:
    model, (x, best) = ActorCritic(), classes()
    optimizer = make(model)
    while True:
        with torch.no_grad():
            old = distributions.Categorical(logits=model(x)[0])
            action = old.sample()
        reward, before = (action == best).float(), old.log_prob(action)
        for _ in range(4):
            logits, value = model(x)
            policy = distributions.Categorical(logits=logits)
            ratio = (policy.log_prob(action) - before).exp()
            advantage = (reward - value).detach()
            loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            step(optimizer, loss + 0.5 * F.mse_loss(value, reward) - 0.01 * policy.entropy().mean())
            yield -logits.softmax(1).gather(1, best[:, None]).mean().item()


@workflow("REINFORCE, one state in each call")
def reinforce(make: Make) -> Iterator[float]:
    model, (x, best) = mlp(8, 32, 4), classes()
    optimizer = make(model)
    while True:
        losses, probabilities = [], []
        for state, right in zip(x[:16], best, strict=False):
            logits = model(state[None])
            policy = distributions.Categorical(logits=logits)
            action = policy.sample()
            losses.append(-policy.log_prob(action) * ((action == right).float() - 0.25))
            probabilities.append(logits.softmax(1)[0, right])
        step(optimizer, torch.cat(losses).sum())
        yield -torch.stack(probabilities).mean().item()


@workflow("Gaussian policy with a learned deviation")
def gaussian_policy(make: Make) -> Iterator[float]:
    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.log_std = mlp(4, 32, 2), nn.Parameter(torch.zeros(2))

        def forward(self, x: Tensor) -> distributions.Normal:
            return distributions.Normal(self.mean(x), self.log_std.exp())

    model, x = Policy(), torch.randn(N, 4)
    target, optimizer = x[:, :2].sin(), make(model)
    while True:
        policy = model(x)
        action = policy.sample()
        reward = -(action - target).square().sum(1)
        step(optimizer, -(policy.log_prob(action).sum(1) * (reward - reward.mean())).mean())
        yield (policy.mean - target).square().sum(1).mean().item()


@workflow("DDPG, actor through a critic")
def ddpg(make: Make) -> Iterator[float]:
    actor, critic, x = mlp(4, 32, 2), mlp(6, 32, 1), torch.randn(N, 4)
    target = x[:, :2].sin()
    of_actor, of_critic = make(actor), make(critic)
    for _ in range(50):
        action = actor(x).detach() + torch.randn(N, 2)
        reward = -(action - target).square().sum(1)
        step(of_critic, F.mse_loss(critic(torch.cat([x, action], 1))[:, 0], reward))
    yield from falls(lambda: step(of_actor, -critic(torch.cat([x, actor(x)], 1)).mean()))


@workflow("DQN with Huber loss and a target network")
def dqn(make: Make) -> Iterator[float]:
    model, (x, best) = mlp(8, 32, 4), classes()
    frozen, optimizer = mlp(8, 32, 4).requires_grad_(False), make(model)
    while True:
        action = torch.randint(4, (N,))
        wanted = (action == best).float() + 0.5 * frozen(x).amax(1)
        yield step(optimizer, F.huber_loss(model(x).gather(1, action[:, None])[:, 0], wanted))


# ---------------------------------------------------------------------------------------------------- generative models


@workflow("VAE with torch.distributions")
def vae(make: Make) -> Iterator[float]:
    class VAE(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = mlp(8, 32, 6), mlp(3, 32, 8)

        def forward(self, x: Tensor) -> tuple[distributions.Normal, Tensor]:
            mean, log_std = self.encoder(x).chunk(2, 1)
            posterior = distributions.Normal(mean, log_std.exp())
            return posterior, self.decoder(posterior.rsample())

    x = (torch.randn(N, 3) @ torch.randn(3, 8) > 0).to(torch.get_default_dtype())

    def loss(model: nn.Module) -> Tensor:
        posterior, logits = model(x)
        prior = distributions.Normal(torch.zeros(3), torch.ones(3))
        fit = distributions.Bernoulli(logits=logits).log_prob(x).sum(1)
        return (distributions.kl_divergence(posterior, prior).sum(1) - fit).mean()

    return minimise(make, VAE(), loss)


@workflow("VAE whose terms are sums over all rows")
def summed_vae(make: Make) -> Iterator[float]:
    class VAE(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = mlp(8, 32, 6), mlp(3, 32, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            mean, log_variance = self.encoder(x).chunk(2, 1)
            z = mean + (log_variance / 2).exp() * torch.randn_like(mean)
            return self.decoder(z).sigmoid(), mean, log_variance

    x = (torch.randn(N, 3) @ torch.randn(3, 8) > 0).to(torch.get_default_dtype())

    def loss(model: nn.Module) -> Tensor:
        reconstruction, mean, log_variance = model(x)
        divergence = -0.5 * torch.sum(1 + log_variance - mean.square() - log_variance.exp())
        return F.binary_cross_entropy(reconstruction, x, reduction="sum") + divergence

    return minimise(make, VAE(), loss)


def gan(make: Make, of_critic: Callable, of_generator: Callable) -> Iterator[float]:
    """A generator of points: first its critic learns, for 30 steps, then it learns against that critic."""
    generator, critic = mlp(2, 32, 2), mlp(2, 32, 1)
    optimizers = make(generator), make(critic)
    for _ in range(30):
        real = torch.randn(N, 2) * 0.5 + 1
        yield step(optimizers[1], of_critic(critic, real, generator(torch.randn(N, 2)).detach()))
    yield from falls(lambda: step(optimizers[0], of_generator(critic(generator(torch.randn(N, 2))))))


@workflow("WGAN with gradient penalty")
def wgan_gp(make: Make) -> Iterator[float]:
    def of_critic(critic: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
        between = (real + torch.rand(N, 1) * (fake - real)).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        return critic(fake).mean() - critic(real).mean() + 10 * (slope.norm(2, 1) - 1).square().mean()

    return gan(make, of_critic, lambda z: -z.mean())


@workflow("GAN with hinge loss")
def hinge_gan(make: Make) -> Iterator[float]:
    return gan(
        make,
        lambda critic, real, fake: F.relu(1 - critic(real)).mean() + F.relu(1 + critic(fake)).mean(),
        lambda z: -z.mean(),
    )


@workflow("GAN with softplus loss")
def softplus_gan(make: Make) -> Iterator[float]:
    def of_critic(critic: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
        return F.softplus(-critic(real)).mean() + F.softplus(critic(fake)).mean()

    return gan(make, of_critic, lambda z: F.softplus(-z).mean())


# ---------------------------------------------------------------------------------------------- embeddings and rankings


def groups() -> tuple[Tensor, Tensor, Tensor]:
    """Anchors, others of their group, and others of another one."""
    centre = torch.randn(8, 8)
    label = torch.arange(N) % 8
    return tuple(centre[each] + 0.5 * torch.randn(N, 8) for each in (label, label, (label + 1) % 8))  # type: ignore[return-value]


@workflow("Triplet loss")
def triplet(make: Make) -> Iterator[float]:
    anchor, same, other = groups()
    return minimise(make, mlp(8, 32, 4), lambda f: F.triplet_margin_loss(f(anchor), f(same), f(other)))


@workflow("Cosine embedding loss")
def cosine(make: Make) -> Iterator[float]:
    anchor, same, other = groups()
    sign = torch.arange(N) % 2 * 2 - 1
    partner = torch.where(sign[:, None] > 0, same, other)
    return minimise(make, mlp(8, 32, 4), lambda f: F.cosine_embedding_loss(f(anchor), f(partner), sign))


@workflow("Margin ranking loss")
def margin(make: Make) -> Iterator[float]:
    better, worse = torch.randn(N, 8) + 0.3, torch.randn(N, 8) - 0.3
    ones = torch.ones(N)
    return minimise(
        make, mlp(8, 32, 1), lambda f: F.margin_ranking_loss(f(better)[:, 0], f(worse)[:, 0], ones, margin=1.0)
    )


@workflow("DPO with a reference model")
def dpo(make: Make) -> Iterator[float]:
    model, reference = (nn.Sequential(nn.Embedding(10, 16), nn.Linear(16, 10)) for _ in range(2))
    chosen, rejected = torch.randint(10, (2, N, 5))
    reference.requires_grad_(False)

    def log_prob(net: nn.Module, ids: Tensor) -> Tensor:
        return net(ids[:, :-1]).log_softmax(2).gather(2, ids[:, 1:, None])[..., 0].sum(1)

    def loss(net: nn.Module) -> Tensor:
        gain = [log_prob(net, ids) - log_prob(reference, ids) for ids in (chosen, rejected)]
        return -F.logsigmoid(gain[0] - gain[1]).mean()

    return minimise(make, model, loss)


# ----------------------------------------------------------------------------------------------- classifiers and vision


@workflow("CTC loss of outputs with the time first")
def ctc(make: Make) -> Iterator[float]:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(6, 32, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x).log_softmax(2).transpose(0, 1)

    x, labels = torch.randn(16, 12, 6), torch.randint(1, 5, (16, 4))
    lengths = torch.full((16,), 12), torch.full((16,), 4)
    return minimise(make, Reader(), lambda model: F.ctc_loss(model(x), labels, *lengths))


@workflow("Ensemble of networks, by torch.func.vmap")
def ensemble(make: Make) -> Iterator[float]:
    class Ensemble(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            networks = [mlp(8, 32, 4) for _ in range(3)]
            stacked, _ = torch.func.stack_module_state(networks)  # type: ignore[arg-type]
            self.names, self.weights = list(stacked), nn.ParameterList(stacked.values())
            vars(self)["one"] = networks[0]  # not a part of this module

        def forward(self, x: Tensor) -> Tensor:
            call = torch.func.vmap(partial(torch.func.functional_call, vars(self)["one"]), (0, None))
            return call(dict(zip(self.names, self.weights, strict=True)), x)

    x, y = classes()
    return minimise(make, Ensemble(), lambda model: F.cross_entropy(model(x).flatten(0, 1), y.repeat(3)))


@workflow("Texts by an LSTM of two layers with dropout")
def stacked_lstm(make: Make) -> Iterator[float]:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(20, 8), nn.Linear(16, 20)
            self.net = nn.LSTM(8, 16, num_layers=2, dropout=0.1, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.net(self.embedding(x))[0])

    x = torch.randint(20, (16, 12))
    return minimise(make, Reader(), lambda model: F.cross_entropy(model(x).flatten(0, 1), x.flip(1).flatten()))


@workflow("Focal loss")
def focal(make: Make) -> Iterator[float]:
    x, y = classes()

    def loss(model: nn.Module) -> Tensor:
        p = model(x).softmax(1).gather(1, y[:, None])
        return -((1 - p).square() * p.log()).mean()

    return minimise(make, mlp(8, 32, 4), loss)


@workflow("Cross-entropy with an entropy bonus")
def entropy_bonus(make: Make) -> Iterator[float]:
    x, y = classes()

    def loss(model: nn.Module) -> Tensor:
        z = model(x)
        return F.cross_entropy(z, y) + 0.05 * (z.softmax(1) * z.log_softmax(1)).sum(1).mean()

    return minimise(make, mlp(8, 32, 4), loss)


@workflow("U-Net with dice loss")
def unet_dice(make: Make) -> Iterator[float]:
    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.inside = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
            self.up = nn.Conv2d(16, 1, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            high = self.down(x).relu()
            low = F.interpolate(self.inside(F.max_pool2d(high, 2)).relu(), scale_factor=2.0)
            return self.up(torch.cat([high, low], 1))

    x = torch.randn(16, 1, 8, 8)
    mask = (F.avg_pool2d(x, 3, 1, 1) > 0).float()

    def loss(model: nn.Module) -> Tensor:
        p = model(x).sigmoid()
        return 1 - (2 * (p * mask).sum() + 1) / (p.sum() + mask.sum() + 1)

    return minimise(make, UNet(), loss)


@workflow("Detector with masked positives")
def detector(make: Make) -> Iterator[float]:
    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.score, self.box = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 1, 1), nn.Conv2d(8, 4, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.body(x).relu()
            return self.score(h)[:, 0], self.box(h).movedim(1, -1)

    x = torch.randn(16, 1, 6, 6)
    positive = x[:, 0] > 1
    boxes = torch.stack([x[:, 0], -x[:, 0], x[:, 0].sin(), x[:, 0].cos()], -1)

    def loss(model: nn.Module) -> Tensor:
        score, box = model(x)
        return F.binary_cross_entropy_with_logits(score, positive.float()) + F.smooth_l1_loss(
            box[positive], boxes[positive]
        )

    return minimise(make, Detector(), loss)


@workflow("Detector with boxes by an L1 loss, as DETR has")
def l1_boxes(make: Make) -> Iterator[float]:
    class Boxes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.label, self.box = mlp(8, 64, 32), nn.Linear(32, 4), mlp(32, 32, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.body(x).tanh()
            return self.label(h), self.box(h).sigmoid()

    x, y = classes()
    boxes = (x[:, :4] - x[:, 4:]).sigmoid()

    def loss(model: nn.Module) -> Tensor:
        label, box = model(x)
        return F.cross_entropy(label, y) + 5 * F.l1_loss(box, boxes)

    return minimise(make, Boxes(), loss)


@workflow("Classifier with an input-gradient penalty")
def gradient_penalty(make: Make) -> Iterator[float]:
    x, y = classes()

    def loss(model: nn.Module) -> Tensor:
        at = x.clone().requires_grad_()
        value = F.cross_entropy(model(at), y)
        (slope,) = torch.autograd.grad(value, at, create_graph=True)
        return value + 10 * N * slope.square().sum(1).mean()

    return minimise(make, mlp(8, 32, 4), loss)


@workflow("Regression of keypoints, in pixels")
def keypoints(make: Make) -> Iterator[float]:
    x = torch.randn(N, 8)
    y = 255 * (x @ torch.randn(8, 4)).sigmoid()
    return minimise(make, mlp(8, 32, 4), lambda model: F.mse_loss(255 * model(x).sigmoid(), y))


@workflow("Recommender whose graph smooths the embeddings")
def light_gcn(make: Make) -> Iterator[float]:
    users, items = torch.randint(40, (2, 600))
    graph = torch.sparse_coo_tensor(
        torch.stack([users, 40 + items]), torch.full((600,), 0.1), (80, 80), check_invariants=False
    )
    graph = (graph + graph.mT).coalesce()

    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(80, 8)

        def forward(self, users: Tensor, items: Tensor) -> Tensor:
            h = self.table.weight
            h = h + torch.sparse.mm(graph, h)
            return (h[users] * h[40 + items]).sum(1)

    def loss(model: nn.Module) -> Tensor:
        batch = torch.randint(600, (N,))
        better = model(users[batch], items[batch]) - model(users[batch], torch.randint(40, (N,)))
        return -F.logsigmoid(better).mean()

    return minimise(make, Graph(), loss)


# ----------------------------------------------------------------------- models that return losses, or fewer rows


class VQVAE(nn.Module):
    """A reconstruction and the term of the codebook (van den Oord et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.codes, self.decoder = mlp(8, 16, 4), nn.Embedding(16, 4), mlp(4, 16, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        e = self.encoder(x)
        q = self.codes(torch.cdist(e, self.codes.weight).argmin(1))
        return self.decoder(e + (q - e).detach()), F.mse_loss(q, e.detach()) + 0.25 * F.mse_loss(e, q.detach())


@workflow("VQ-VAE that returns the term of its codebook")
def vq_vae(make: Make) -> Iterator[float]:
    x = torch.randn(N, 2) @ torch.randn(2, 8)

    def loss(model: nn.Module) -> Tensor:
        reconstruction, term = model(x)
        return F.mse_loss(reconstruction, x) + term

    return minimise(make, VQVAE(), loss)


@workflow("CLIP, which returns the matrix of pairs and its transpose")
def clip(make: Make) -> Iterator[float]:
    class Clip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image, self.text, self.scale = mlp(8, 32, 8), mlp(6, 32, 8), nn.Parameter(torch.tensor(1.0))

        def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
            z = self.scale.exp() * F.normalize(self.image(images)) @ F.normalize(self.text(texts)).T
            return z, z.T

    images, y = torch.randn(N, 8), torch.arange(N)
    texts = images @ torch.randn(8, 6)

    def loss(model: nn.Module) -> Tensor:
        of_images, of_texts = model(images, texts)
        return (F.cross_entropy(of_images, y) + F.cross_entropy(of_texts, y)) / 2

    return minimise(make, Clip(), loss)


@workflow("Model that returns its loss, of classes and boxes")
def returned_loss(make: Make) -> Iterator[float]:
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.label, self.box = mlp(8, 32, 16), nn.Linear(16, 4), nn.Linear(16, 2)

        def forward(self, x: Tensor, y: Tensor, boxes: Tensor) -> Tensor:
            h = self.body(x).tanh()
            return F.cross_entropy(self.label(h), y) + F.smooth_l1_loss(self.box(h), boxes)

    x, y = classes()
    return minimise(make, Returns(), lambda model: model(x, y, x[:, :2]))


@workflow("Texts of different lengths in nn.EmbeddingBag")
def embedding_bag(make: Make) -> Iterator[float]:
    class Texts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.last = nn.EmbeddingBag(30, 16), nn.Linear(16, 3)

        def forward(self, tokens: Tensor, offsets: Tensor) -> Tensor:
            return self.last(self.bag(tokens, offsets))

    lengths = torch.randint(2, 9, (N,))
    tokens, offsets = torch.randint(30, (int(lengths.sum()),)), lengths.cumsum(0) - lengths
    y = tokens[offsets] % 3
    return minimise(make, Texts(), lambda model: F.cross_entropy(model(tokens, offsets), y))


@workflow("Batch of graphs, one prediction for each")
def graphs(make: Make) -> Iterator[float]:
    class Graphs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 3)

        def forward(self, nodes: Tensor, graph: Tensor) -> Tensor:
            return self.last(torch.zeros(int(graph.max()) + 1, 16).index_add(0, graph, self.first(nodes).relu()))

    nodes, graph = torch.randn(4 * N, 8), torch.arange(4 * N) % N
    y = torch.zeros(N, 8).index_add(0, graph, nodes)[:, :3].argmax(1)
    return minimise(make, Graphs(), lambda model: F.cross_entropy(model(nodes, graph), y))


@workflow("Graph convolutions with a sparse matrix of neighbours")
def sparse_graph(make: Make) -> Iterator[float]:
    class Convolutions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor, neighbours: Tensor) -> Tensor:
            return torch.sparse.mm(neighbours, self.last(torch.sparse.mm(neighbours, self.first(x)).relu()))

    x, y = classes()
    near = (torch.cdist(x, x) < 3).to(torch.get_default_dtype())
    near = (near / near.sum(1, keepdim=True)).to_sparse()
    return minimise(make, Convolutions(), lambda model: F.cross_entropy(model(x, near), y))


@workflow("Packed texts, which attend within themselves")
def packed_texts(make: Make) -> Iterator[float]:
    class Tagger(nn.Module):
        """A tag for each of the tokens ``[T]`` of several texts behind each other."""

        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.qkv, self.last = nn.Embedding(20, 16), nn.Linear(16, 48), nn.Linear(16, 4)

        def forward(self, tokens: Tensor, text: Tensor) -> Tensor:
            h = self.embedding(tokens)
            q, k, v = self.qkv(h).chunk(3, 1)
            scores = (q @ k.T / 4).masked_fill(text[:, None] != text, -torch.inf)
            return self.last((h + scores.softmax(1) @ v).tanh())

    tokens, text = torch.randint(20, (96,)), torch.arange(8).repeat_interleave(torch.arange(5, 20, 2))
    tags = (tokens + tokens.roll(1)) % 4
    return minimise(make, Tagger(), lambda model: F.cross_entropy(model(tokens, text), tags))


# --------------------------------------------------------------------------------------- where no samples can be found


@workflow("PCGrad, which combines the gradients of two tasks by hand")
def combined_gradients(make: Make) -> Iterator[float]:
    model, (x, y) = mlp(8, 32, 8), classes()
    other = x.flip(0) @ torch.randn(8, 4) / 3
    optimizer, params = make(model), list(model.parameters())
    while True:
        z = model(x)
        losses = F.cross_entropy(z[:, :4], y), F.mse_loss(z[:, 4:], other)
        one, two = (torch.autograd.grad(loss, params, retain_graph=True) for loss in losses)
        conflict = sum((a * b).sum() for a, b in zip(one, two, strict=True)) < 0
        for p, a, b in zip(params, one, two, strict=True):
            apart = b - (a * b).sum() / a.square().sum() * a if conflict else b
            p.grad = a + apart
        optimizer.step()
        yield (losses[0] + losses[1]).item()


@workflow("Differential equation with its loss inside of the model")
def equation_inside(make: Make) -> Iterator[float]:
    class Equation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.u = mlp(1, 32, 1)

        def forward(self, inside: Tensor, edge: Tensor) -> Tensor:
            x = inside.requires_grad_()
            (slope,) = torch.autograd.grad(self.u(x).sum(), x, create_graph=True)
            (curve,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
            return (curve + x.sin()).square().mean() + self.u(edge).square().mean()

    inside, edge = 3 * torch.rand(N, 1), torch.tensor([[0.0], [3.0]])
    return minimise(make, Equation(), lambda model: model(inside.clone(), edge))


@workflow("SimCLR with its loss inside of the model")
def simclr_inside(make: Make) -> Iterator[float]:
    class SimCLR(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = mlp(8, 32, 8)

        def forward(self, one: Tensor, other: Tensor) -> Tensor:
            z = F.normalize(self.encoder(torch.cat([one, other])), dim=1)
            pairs = (z @ z.T / 0.1).fill_diagonal_(-torch.inf)
            return F.cross_entropy(pairs, torch.arange(len(z)).roll(len(one)))

    x = torch.randn(N, 8)
    return minimise(make, SimCLR(), lambda model: model(x, x + 0.3 * torch.randn(N, 8)))


@workflow("One number for each graph, which is no row of anything")
def numbers_of_graphs(make: Make) -> Iterator[float]:
    class Energies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.atom = mlp(8, 32, 1)

        def forward(self, atoms: Tensor, graph: Tensor) -> Tensor:
            return torch.zeros(N).index_add(0, graph, self.atom(atoms)[:, 0])

    atoms, graph = torch.randn(4 * N, 8), torch.arange(4 * N) % N
    energies = torch.zeros(N).index_add(0, graph, atoms[:, 0].sin())
    return minimise(make, Energies(), lambda model: F.mse_loss(model(atoms, graph), energies))


@workflow("Energies and forces of molecules, which are derivatives of the energy")
def forces(make: Make) -> Iterator[float]:
    class Energies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kind, self.out = nn.Embedding(3, 16), mlp(16, 32, 1)
            self.filter = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 16))

        def forward(self, kinds: Tensor, places: Tensor, molecule: Tensor) -> tuple[Tensor, Tensor]:
            places = places.requires_grad_()
            a, b = pairs_of(molecule)
            distances = (places[a] - places[b]).norm(dim=1, keepdim=True)
            near = (-4 * (distances - torch.linspace(0, 4, 8)).square()).exp()
            atoms = self.kind(kinds).index_add(0, a, self.filter(near) * self.kind(kinds)[b])
            energies = torch.zeros(8).index_add(0, molecule, self.out(atoms)[:, 0])
            return energies, -torch.autograd.grad(energies.sum(), places, create_graph=True)[0]

    def pairs_of(molecule: Tensor) -> tuple[Tensor, Tensor]:
        alike = (molecule[:, None] == molecule) & ~torch.eye(len(molecule), dtype=torch.bool)
        return alike.nonzero().unbind(1)

    kinds, places, molecule = torch.randint(3, (40,)), 1.2 * torch.randn(40, 3), torch.arange(40) % 8
    with torch.enable_grad():
        places.requires_grad_()
        a, b = pairs_of(molecule)
        bonds = -(-((places[a] - places[b]).norm(dim=1) - 1.5).square()).exp() / 2
        (slopes,) = torch.autograd.grad(bonds.sum(), places)
    energies = torch.zeros(8).index_add(0, molecule[a], bonds.detach())

    def loss(model: nn.Module) -> Tensor:
        energy, force = model(kinds, places.detach(), molecule)
        return F.mse_loss(energy, energies) + 10 * F.mse_loss(force, -slopes)

    return minimise(make, Energies(), loss)


@workflow("Picture of splats, a model without inputs")
def splats(make: Make) -> Iterator[float]:
    class Picture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.center, self.size = nn.Parameter(torch.rand(40, 2)), nn.Parameter(torch.full((40, 1), -2.0))
            self.colour = nn.Parameter(torch.zeros(40, 3))

        def forward(self) -> Tensor:
            shares = (-(torch.cdist(grid, self.center) / self.size.exp().T).square()).exp()
            return shares @ self.colour

    grid = torch.cartesian_prod(torch.linspace(0, 1, 16), torch.linspace(0, 1, 16))
    picture = torch.stack([(9 * grid[:, 0]).sin(), grid[:, 1], grid.prod(1)], 1)
    return minimise(make, Picture(), lambda model: F.mse_loss(model(), picture))
