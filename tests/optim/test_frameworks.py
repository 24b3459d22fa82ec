"""One changed line trains inside of Lightning, accelerate and transformers; compiled models give the same numbers."""

from __future__ import annotations

import contextlib
import shutil
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
import torch.nn.functional as F
from checks import generator
from optimizer_cases import assert_close, assert_equal, cnn, counters, descend, digits, silent
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from curvopt import CurvoptError, backpack, disable, extend
from curvopt.errors import CurvoptWarning
from curvopt.extensions import KFAC, KFLR, BatchGrad, DiagGGNExact, DiagHessian, KFACEmpirical
from curvopt.optim import EKFACSGD, KFACSGD, KFACAdamW, KFACPreconditioner

STEPS = 12


def batches(count: int = 25) -> DataLoader:
    return DataLoader(TensorDataset(*(data[: 64 * count] for data in digits())), 64)


def linear_decay(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 40)


def by_hand(model: nn.Module, optimizer: KFACSGD, parts: int, clip: float, steps: int = STEPS) -> nn.Module:
    """The loop that the frameworks run: accumulate, clip, step, schedule."""
    schedule, data = linear_decay(optimizer), iter(batches())
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(parts):
            x, y = next(data)
            (F.cross_entropy(model(x), y) / parts).backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        schedule.step()
    return model


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def assert_trained(losses: list[float], optimizer: Any, factor: float) -> None:
    """The loss went down, and curvature reached every parameter."""
    assert sum(losses[-3:]) / 3 < factor * losses[0], losses
    assert set(optimizer.coverage().values()) == {"kronecker", "dense"}


# ------------------------------------------------------------------------------------------------------------ Lightning


@pytest.fixture(scope="module")
def lightning() -> Any:
    return pytest.importorskip("lightning")


def lightning_fit(
    lightning: Any,
    *,
    steps: int = STEPS,
    data: DataLoader | None = None,
    checkpoint: Path | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """A Trainer that has trained a module, and the module."""

    class Digits(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net, self.losses = cnn(), []

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            x, y = batch
            loss = F.cross_entropy(self.net(x), y)
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> dict[str, Any]:
            scaler = getattr(self.trainer.precision_plugin, "scaler", None)
            optimizer = KFACSGD(self, lr=0.3, scaler=scaler)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": linear_decay(optimizer), "interval": "step"},
            }

    module = Digits()
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"enable_checkpointing": False, **options},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", CurvoptWarning)
        trainer.fit(module, data or batches(), ckpt_path=checkpoint)
    return trainer, module


def test_lightning_is_the_loop_by_hand(lightning: Any):
    _, module = lightning_fit(lightning, accumulate_grad_batches=2, gradient_clip_val=0.5)
    torch.manual_seed(0)
    model = cnn()
    by_hand(model, KFACSGD(model, lr=0.3), 2, 0.5)
    assert_equal(weights(module.net), weights(model))


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true"])
def test_lightning_in_mixed_precision(lightning: Any, precision: str):
    options: dict[str, Any] = {"precision": precision}
    if precision == "16-mixed":  # on a CPU, Lightning itself would take bfloat16
        plugin = lightning.pytorch.plugins.MixedPrecision(precision, "cpu", torch.amp.GradScaler("cpu"))
        options = {"plugins": [plugin]}
    trainer, module = lightning_fit(lightning, steps=25, gradient_clip_val=5.0, **options)
    assert_trained(module.losses, trainer.optimizers[0], 0.5)


def test_lightning_resumes_bit_for_bit(lightning: Any, tmp_path: Path):
    every_epoch = lightning.pytorch.callbacks.ModelCheckpoint(
        tmp_path, save_top_k=-1, save_on_train_epoch_end=True, filename="{epoch}"
    )
    # epochs of one batch: with more, Lightning itself sees batches in another order after a checkpoint
    options = {"data": batches(1), "gradient_clip_val": 0.5}
    _, straight = lightning_fit(lightning, callbacks=[every_epoch], enable_checkpointing=True, **options)
    _, resumed = lightning_fit(lightning, checkpoint=tmp_path / "epoch=4.ckpt", **options)
    assert len(resumed.losses) == STEPS - 5
    assert_equal(weights(straight), weights(resumed))


# ----------------------------------------------------------------------------------------------------------- accelerate


@pytest.fixture
def accelerator() -> Iterator[Callable]:
    accelerate = pytest.importorskip("accelerate")

    def make(**options: Any) -> Any:
        accelerate.state.AcceleratorState._reset_state(True)
        return accelerate.Accelerator(cpu=True, **options)

    yield make
    accelerate.state.AcceleratorState._reset_state(True)


def accelerated(accelerator: Any, steps: int, clip: float, resume: Path | None = None) -> tuple[nn.Module, Any, list]:
    torch.manual_seed(0)
    model, losses = cnn(), []
    optimizer = KFACSGD(model.named_parameters(), lr=0.3)
    optimizer.attach(model)
    prepared = accelerator.prepare(model, optimizer, batches(), linear_decay(optimizer))
    model, wrapped, loader, schedule = prepared
    if resume is not None:
        accelerator.load_state(str(resume))
        loader = accelerator.skip_first_batches(loader, 5 * accelerator.gradient_accumulation_steps)
    for x, y in loader:
        if counters(optimizer)["step"] == steps:
            break
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            wrapped.step()
            schedule.step()
            wrapped.zero_grad()
        losses.append(loss.item())
    return model, optimizer, losses


def test_accelerate_is_the_loop_by_hand(accelerator: Callable):
    model, *_ = accelerated(accelerator(gradient_accumulation_steps=2), STEPS, 0.5)
    torch.manual_seed(0)
    other = cnn()
    assert_equal(weights(model), weights(by_hand(other, KFACSGD(other, lr=0.3), 2, 0.5)))


def test_accelerate_in_mixed_precision(accelerator: Callable):
    _, optimizer, losses = accelerated(accelerator(mixed_precision="bf16"), 25, 5.0)
    assert_trained(losses, optimizer, 0.5)


def test_accelerate_resumes_bit_for_bit(accelerator: Callable, tmp_path: Path):
    straight, *_ = accelerated(accelerator(), STEPS, 0.5)
    first = accelerator()
    accelerated(first, 5, 0.5)
    first.save_state(str(tmp_path))
    second, *_ = accelerated(accelerator(), STEPS, 0.5, resume=tmp_path)
    assert_equal(weights(straight), weights(second))


# --------------------------------------------------------------------------------------------------------- transformers


@pytest.fixture(scope="module")
def transformers() -> Any:
    package = pytest.importorskip("transformers")
    package.logging.set_verbosity_error()
    return package


LETTERS, LENGTH = 12, 10


def sentences(classes: int | None = None) -> list[dict[str, Any]]:
    """Sequences in which every letter decides the next but for some noise; labelled, or to be continued."""
    random = generator(0)
    samples = []
    for _ in range(192):
        steps = torch.randint(1, 3, (LENGTH,), generator=random)
        ids = 1 + steps.cumsum(0) % (LETTERS - 1)
        mask = torch.ones_like(ids)
        mask[int(torch.randint(LENGTH // 2, LENGTH + 1, (), generator=random)) :] = 0  # of different lengths
        ids = ids * mask
        labels = ids.masked_fill(mask == 0, -100) if classes is None else ids[0] % classes
        samples.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return samples


def gpt2(transformers: Any, dropout: float = 0.1, layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    sizes = {"vocab_size": LETTERS, "n_positions": LENGTH, "n_embd": 16, "n_layer": layers, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropouts, bos_token_id=0, eos_token_id=0))


ENCODER = {
    "vocab_size": LETTERS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": LENGTH,
}


def bert(transformers: Any) -> nn.Module:
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(transformers.BertConfig(**ENCODER, num_labels=3))


def hf_train(
    transformers: Any,
    folder: Path,
    model: nn.Module,
    samples: list,
    *,
    steps: int = STEPS,
    resume: bool = False,
    schedule: Callable[[torch.optim.Optimizer], Any] = lambda optimizer: None,
    fisher: Any = "mc",
    **options: Any,
) -> tuple[list[float], KFACSGD]:
    """Losses of ``transformers.Trainer``, and the optimizer."""
    optimizer = KFACSGD(model.named_parameters(), lr=0.1, fisher=fisher)
    optimizer.attach(model)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        per_device_train_batch_size=16,
        max_steps=steps,
        logging_steps=1,
        seed=0,
        **{"save_strategy": "no", **options},
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=samples, optimizers=(optimizer, schedule(optimizer)))
    trainer.remove_callback(transformers.PrinterCallback)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CurvoptWarning)  # positions need not be computed sample by sample
        trainer.train(resume_from_checkpoint=resume)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], optimizer


@pytest.mark.parametrize("options", [{}, {"bf16": True, "gradient_accumulation_steps": 2, "max_grad_norm": 5.0}])
@pytest.mark.parametrize(("model", "classes", "factor"), [(gpt2, None, 0.75), (bert, 3, 0.5)])
def test_transformers_train(
    transformers: Any, tmp_path: Path, model: Callable, classes: int | None, factor: float, options: dict[str, Any]
):
    arguments = {"lr_scheduler_type": "cosine", "warmup_steps": 3, **options}
    losses, optimizer = hf_train(transformers, tmp_path, model(transformers), sentences(classes), steps=30, **arguments)
    assert_trained(losses, optimizer, factor)
    matrices = {name for name, p in model(transformers).named_parameters() if p.dim() == 2}
    matrices.discard("transformer.wte.weight")  # of two kinds at once, since the head is tied to it
    assert {name for name, kind in optimizer.coverage().items() if kind == "kronecker"} == matrices


def test_transformers_train_as_by_hand(transformers: Any, tmp_path: Path):
    """The Trainer divides by the number of labels in all accumulated batches, the first of each text among them."""
    model, seen = gpt2(transformers, 0.0), []
    recording = model.register_forward_pre_hook(lambda _, args, batch: seen.append(batch), with_kwargs=True)
    hf_train(
        transformers,
        tmp_path,
        model,
        sentences(),
        schedule=linear_decay,
        fisher="empirical",
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
    )
    recording.remove()
    other = gpt2(transformers, 0.0).train()
    optimizer = KFACSGD(other, lr=0.1, fisher="empirical")
    schedule = linear_decay(optimizer)
    for first, second in zip(seen[::2], seen[1::2], strict=True):
        labels = sum(int((batch["labels"] >= 0).sum()) for batch in (first, second))
        optimizer.zero_grad()
        for batch in (first, second):
            logits = other(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1].flatten(0, 1)
            loss = F.cross_entropy(logits, batch["labels"][:, 1:].flatten(), reduction="sum") / labels
            loss.backward()
        nn.utils.clip_grad_norm_(other.parameters(), 0.5)
        optimizer.step()
        schedule.step()
    assert len(seen) == 2 * STEPS
    assert_close(weights(model), weights(other), rtol=1e-3, atol=5e-4)


def test_transformers_resume_bit_for_bit(transformers: Any, tmp_path: Path):
    models = [gpt2(transformers) for _ in range(2)]
    options = {"save_strategy": "steps", "save_steps": 5}
    hf_train(transformers, tmp_path, models[0], sentences(), **options)
    for checkpoint in tmp_path.glob("checkpoint-*"):
        if checkpoint.name != "checkpoint-5":
            shutil.rmtree(checkpoint)
    hf_train(transformers, tmp_path, models[1], sentences(), resume=True, **options)
    assert_equal(weights(models[0]), weights(models[1]))


def test_layers_of_transformers_have_the_numbers_of_autograd(transformers: Any):
    """Its own linear layer and shared positions: per-sample gradients are those of each sample by itself."""
    model = extend(gpt2(transformers).double().eval())
    ids = torch.stack([sample["input_ids"] for sample in sentences()[:3]])
    lossfunc = extend(nn.CrossEntropyLoss(reduction="sum"))
    with warnings.catch_warnings(), backpack(BatchGrad(), KFLR()):
        warnings.simplefilter("error", CurvoptWarning)
        lossfunc(model(ids).logits[:, -1], ids[:, 0]).backward()
    for n in range(3):
        loss = F.cross_entropy(model(ids[n : n + 1]).logits[:, -1], ids[n : n + 1, 0])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        assert_close([p.grad_batch[n] for p in model.parameters()], list(gradients))
    layer = model.transformer.h[0].attn.c_attn
    assert [factor.shape for factor in layer.weight.kflr] == [(16, 16), (48, 48)]


@pytest.mark.parametrize("make", [KFACSGD, EKFACSGD, KFACAdamW])
def test_a_classifier_of_texts_trains_on_small_batches(transformers: Any, make: Callable):
    """With defaults and dropout, on 16 texts a step: at first, all gradients but the last bias' are nearly zero."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 32}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**(ENCODER | sizes), num_labels=5))
    optimizer = make(model.parameters())
    optimizer.attach(model)

    def loss() -> Tensor:
        words = (torch.randint(50, (16, 1)) + 3 * torch.arange(17)) % 50
        return model(input_ids=words, labels=words[:, 0] % 5).loss

    losses = descend(optimizer, loss, 100)
    assert sum(losses[-10:]) / 10 < 0.5, losses


@pytest.mark.parametrize("name", ["llama", "vit", "t5"])
def test_other_models_of_transformers(transformers: Any, name: str):
    """Rotary positions, root mean square norms, a class token, relative positions, an encoder beside a decoder."""
    torch.manual_seed(0)
    ids = torch.stack([sample["input_ids"] for sample in sentences()[:32]])
    words = {"input_ids": ids, "labels": ids}
    if name == "llama":
        config = transformers.LlamaConfig(**ENCODER, num_key_value_heads=1)
        model, batch = transformers.LlamaForCausalLM(config), words
    elif name == "vit":
        layers = {key: value for key, value in ENCODER.items() if key not in ("vocab_size", "max_position_embeddings")}
        config = transformers.ViTConfig(**layers, image_size=8, patch_size=4, num_channels=1, num_labels=10)
        x, y = digits()
        model, batch = transformers.ViTForImageClassification(config), {"pixel_values": x[:32], "labels": y[:32]}
    else:
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
        config = transformers.T5Config(vocab_size=LETTERS, **sizes, decoder_start_token_id=0, dropout_rate=0.0)
        model, batch = transformers.T5ForConditionalGeneration(config), words
    optimizer = KFACSGD(model.named_parameters(), lr=0.1)
    optimizer.attach(model.train())

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(**batch).loss

    with warnings.catch_warnings():
        # relative positions are shared by all samples, and are no sum
        warnings.simplefilter("ignore" if name == "t5" else "error", CurvoptWarning)
        losses = descend(optimizer, loss, 16)
    assert_trained(losses, optimizer, 0.8)


# -------------------------------------------------------------------------------------------------------- torch.compile


class Net(nn.Module):
    """Modules, and functional code between them that a compiler fuses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))
        self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = F.gelu(x) * torch.sigmoid(x) + x.softmax(-1)
        x = F.layer_norm(x, (8,))
        return self.last(F.silu(x + self.middle(torch.sin(x) * x)))


X, Y = torch.randn(10, 6, dtype=torch.float64), torch.randint(4, (10,))


def seeded(make: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(0)
    return make().double()


net = partial(seeded, Net)


def fields(
    model: nn.Module, call: Callable[[Tensor], Tensor], lossfunc: Callable, *extensions: Any, rows: int = len(X)
) -> list[Tensor]:
    """Quantities of every parameter of a model that is called as ``call``."""
    with backpack(*(extensions or (BatchGrad(), KFLR(), DiagGGNExact()))) as context:
        lossfunc(call(X[:rows]), Y[:rows]).backward()
    names = [extension.field for extension in context.extensions]
    values = [getattr(p, name) for p in model.parameters() for name in names]
    return [tensor for value in values for tensor in (value if isinstance(value, list) else [value])]


def extended_after(model: nn.Module, backend: str) -> Callable:
    compiled = torch.compile(model, backend=backend)
    return extend(compiled)


def extended_before(model: nn.Module, backend: str) -> Callable:
    return torch.compile(extend(model), backend=backend)


def in_place(model: nn.Module, backend: str) -> Callable:
    extend(model).compile(backend=backend)
    return model


def a_layer(model: nn.Module, backend: str) -> Callable:
    model.last = torch.compile(model.last, backend=backend)
    return extend(model)


def a_block_in_place(model: nn.Module, backend: str) -> Callable:
    model.first.compile(backend=backend)
    return extend(model)


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


compiling = pytest.mark.usefixtures("_fresh_compiler")
cpp = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("c++")), reason="inductor needs a C++ compiler")


class Attending(nn.Module):
    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.attention, self.last = nn.MultiheadAttention(6, 2, batch_first=batch_first), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        axis = 1 if self.attention.batch_first else 0
        tokens = torch.stack([x, x.sin(), x.cos()], axis)
        return self.last(self.attention(tokens, tokens, tokens, need_weights=False)[0].mean(axis))


def tied() -> nn.Module:
    """A parameter that is used outside of its module."""
    forward = lambda net, x: 2 * F.linear(torch.tanh(net.head(net.inner(x))), net.head.weight)  # noqa: E731
    return cases.Net(forward, inner=Net(), head=nn.Linear(4, 4, bias=False))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))


COMPILED: list[Any] = [
    *((Net, form, "aot_eager", ()) for form in (extended_after, in_place, a_layer, a_block_in_place)),
    *((Net, form, "eager", ()) for form in (extended_after, a_block_in_place)),
    pytest.param(Net, extended_before, "inductor", (), marks=cpp),
    (normed, extended_before, "aot_eager", (KFAC,)),
    (lambda: normed().eval(), extended_before, "aot_eager", ()),
    (Attending, extended_before, "aot_eager", (BatchGrad, DiagGGNExact)),
    (tied, extended_before, "aot_eager", (BatchGrad,)),
]


@compiling
@pytest.mark.parametrize(("make", "form", "backend", "kinds"), COMPILED)
def test_compiled_models_have_the_fields_of_the_model(make: Callable, form: Callable, backend: str, kinds: tuple):
    plain, model = (seeded(make) for _ in range(2))
    lossfunc, call = extend(nn.CrossEntropyLoss()), form(model, backend)
    extend(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error" if make is normed else "ignore", CurvoptWarning)
        for rows in (10, 10, 7):  # compiling, compiled, and compiling for any number of rows
            found, expected = (
                fields(net, run, lossfunc, *(with_generator(kind) for kind in kinds), rows=rows)
                for net, run in ((model, call), (plain, plain))
            )
            assert_close(found, expected)


def with_generator(kind: type) -> Any:
    return kind(generator=generator(0)) if kind is KFAC else kind()


@compiling
def test_a_compiled_model_trains_alike():
    def train(wrap: Callable) -> list[Tensor]:
        model = net()
        call, optimizer = wrap(model), EKFACSGD(model.parameters(), curvature_every=2)
        optimizer.attach(model)
        descend(optimizer, lambda: F.cross_entropy(call(X), Y), 6)
        assert set(optimizer.coverage().values()) == {"kronecker", "dense"}
        return weights(model)

    assert_close(train(lambda model: torch.compile(model, backend="aot_eager")), train(lambda model: model))


@compiling
def test_a_step_that_was_compiled_with_another_optimizer_before():
    """Code that was compiled for a model without hooks is not run for one that has some."""

    def train(make: Callable, compiled: bool = True) -> list[Tensor]:
        model = net()
        forward = torch.compile(model, backend="aot_eager") if compiled else model
        forward(X)  # before it is attached
        optimizer = make(model.parameters())
        if hasattr(optimizer, "attach"):
            optimizer.attach(model)

        def step(x: Tensor, y: Tensor) -> None:
            optimizer.zero_grad()
            F.cross_entropy(forward(x), y).backward()
            optimizer.step()

        run = torch.compile(step, backend="aot_eager") if compiled else step
        for _ in range(3):
            run(X, Y)
        return weights(model)

    train(torch.optim.AdamW)
    make = partial(KFACSGD, fisher="empirical")  # what is compiled has no second derivative
    assert_close(train(make), train(make, compiled=False))


@compiling
@pytest.mark.parametrize("make", [KFACSGD, KFACPreconditioner])
def test_a_whole_compiled_step(make: Callable):
    """Compiled with the step, the loss has no second derivative; compiled without it, the model trains as it was."""
    lossfunc = nn.CrossEntropyLoss()

    def train(fisher: str, compiles: str = "") -> list[Tensor]:
        model, preconditioner = net(), None
        optimizer = make(model, fisher=fisher)
        if make is KFACPreconditioner:
            preconditioner, optimizer = optimizer, torch.optim.SGD(model.parameters(), lr=0.01)
        forward = torch.compile(model, backend="aot_eager") if compiles == "model" else model

        def step() -> None:
            optimizer.zero_grad()
            lossfunc(forward(X), Y).backward()
            if preconditioner is not None:
                preconditioner.step()
            optimizer.step()

        run = torch.compile(step, backend="aot_eager") if compiles == "step" else step
        for _ in range(3):
            run()
        return weights(model)

    message = "empirical quantity.*compute the loss outside of what torch.compile compiles"
    with pytest.warns(CurvoptWarning, match=message):
        assert_close(train("exact", "step"), train("empirical"))
    with silent():
        assert_close(train("exact", "model"), train("exact"))


@compiling
@pytest.mark.parametrize("donated", [True, False])
def test_a_loss_that_is_compiled_by_itself(donated: bool):
    model = extend(net())
    by_hand = lambda z, y: (z.logsumexp(1) - z[torch.arange(len(y)), y]).mean()  # noqa: E731
    with torch._functorch.config.patch(donated_buffer=donated):
        compiled = torch.compile(by_hand, backend="aot_eager")
        assert_close(fields(model, model, compiled, BatchGrad()), fields(model, model, by_hand, BatchGrad()))
        for extension in (KFAC(), DiagGGNExact(), DiagHessian()):
            with pytest.raises(CurvoptError, match="compiled by torch.compile, which has no second derivative"):
                fields(model, model, compiled, extension)
        with pytest.raises(CurvoptError, match="donated_buffer") if donated else contextlib.nullcontext():
            found = fields(model, model, compiled, KFACEmpirical())
            assert_close(found, fields(model, model, by_hand, KFACEmpirical()))


@compiling
def test_what_compiled_code_hides_is_computed_or_refused():
    """Samples that a batch norm mixes, samples elsewhere, second derivatives, attention, modules before extend()."""
    lossfunc = extend(nn.CrossEntropyLoss())
    for make, extension, message in (
        (normed, BatchGrad(), r"grad_batch needs independent samples of 0 \(Linear\)"),
        (lambda: Attending(False), BatchGrad(), "samples along axis 0"),
        (Net, DiagHessian(), "no second derivative"),
    ):
        model = seeded(make)
        with pytest.raises(CurvoptError, match=message):
            fields(model, extended_before(model, "aot_eager"), lossfunc, extension)
    model = seeded(Attending)
    fields(model, extended_before(model, "aot_eager"), lossfunc, KFLR())
    assert [factor.shape for factor in model.attention.in_proj_weight.kflr] == [(108, 108)]  # not read off the graph
    late = seeded(Net).first
    compiled = torch.compile(late, backend="aot_eager")
    compiled(X).sum().backward()
    extend(late)
    assert_close(fields(late, compiled, lossfunc, BatchGrad()), fields(late, late, lossfunc, BatchGrad()))


@compiling
def test_one_graph_is_possible_where_nothing_is_recorded():
    model = extend(net())
    whole = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(whole(X), model(X))
    with disable():
        torch.testing.assert_close(whole(X), model(X))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="curvopt reads the autograd graph"):
        whole(X)


def traced(model: nn.Module) -> Callable:
    return torch.jit.trace(model, X)


def exported(model: nn.Module, strict: bool) -> Callable:
    sizes = ({0: torch.export.Dim.DYNAMIC},)
    return torch.export.export(model, (X,), dynamic_shapes=sizes, strict=strict).module()


@compiling
@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning", "ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("write_down", [traced, partial(exported, strict=False), partial(exported, strict=True)])
def test_extended_models_are_traced_and_exported(write_down: Callable):
    """What is written down is the model, without records."""
    model, plain, lossfunc = extend(net()), extend(net()), nn.CrossEntropyLoss()
    torch.testing.assert_close(write_down(model)(X), plain(X))
    assert_close(fields(model, model, lossfunc), fields(plain, plain, lossfunc))


@pytest.mark.filterwarnings("ignore:.*quant:UserWarning", "ignore:.*torch.ao:DeprecationWarning")
def test_extended_models_are_quantized():
    model, plain = extend(net()).float().eval(), net().float().eval()
    plain.load_state_dict(model.state_dict())
    quantized, expected = (torch.ao.quantization.quantize_dynamic(each, {nn.Linear}) for each in (model, plain))
    torch.testing.assert_close(quantized(X.float()), expected(X.float()))
