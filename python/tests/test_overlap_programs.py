"""Programs of others with overlap="forward", in the check mode that finds reads without waiting."""

import os
import signal

import pytest
import torch
from torch.nn import functional as F

import plimsoll.torch
from gpt import GPT, batch, text
from test_crash import die_after, digest, killed_again_and_again
from test_optimizer import backward, network

DATA = text()
READS_WITHOUT_WAITING = r"(\w+) uses parameter (\S+), whose update is under way, and nothing has waited for it: call optimizer.synchronize"


@pytest.fixture(autouse=True)
def check(monkeypatch):
    monkeypatch.setenv("PLIMSOLL_CHECK_OVERLAP", "1")


def adamw(model, overlap="forward", **options):
    return plimsoll.torch.AdamW(model.parameters(), lr=1e-2, model=model, overlap=overlap, **{"max_grad_norm": 0.3, **options})


def estimate_loss(model):
    """As nanoGPT's train.py does between steps."""
    model.eval()
    with torch.no_grad():
        losses = [model.loss(batch(DATA, 1000 + i)).item() for i in range(2)]
    model.train()
    return losses


def test_a_loop_like_nanogpts(tmp_path):
    found = []
    for overlap in (None, "forward"):
        torch.manual_seed(0)
        model = GPT()
        optimizer, seen = adamw(model, overlap), []
        for i in range(12):
            if i % 4 == 0:
                seen += estimate_loss(model)
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "ckpt.pt")
            for micro in range(2):
                (model.loss(batch(DATA, 2 * i + micro)) / 2).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        saved = torch.load(tmp_path / "ckpt.pt")
        optimizer.synchronize()
        found.append((seen, digest(model), [saved["model"], saved["optimizer"]["state"]]))
    assert found[0][:2] == found[1][:2]
    torch.testing.assert_close(found[0][2], found[1][2], rtol=0, atol=0)


STALE = {
    "average": lambda p: torch.zeros_like(p).mul_(0.9).add_(p, alpha=0.1),
    "average of data": lambda p: torch.zeros_like(p).lerp_(p.data, 0.1),
    "copy": lambda p: p.detach().clone(),
    "norm": lambda p: p.norm(),
    "numpy": lambda p: p.detach().numpy(),
    "save": lambda p: torch.save(p, os.devnull),
    "write": lambda p: p.data.clamp_(-1, 1),
    "row": lambda p: p[1].tolist(),
    "all": lambda p: torch._foreach_norm([torch.ones(1), p]),
    "deepcopy": lambda p: __import__("copy").deepcopy(p),
    "gradient": lambda p: p.grad.add_(1),
}


@pytest.mark.parametrize("way", ["shared", "copied"], indirect=True)
def test_reads_that_do_not_wait_are_found(way):
    model = network()
    optimizer = adamw(model)
    backward(model, 0)
    optimizer.step()
    assert [p.shape for p in model.parameters()] and torch.empty_like(model[2].weight).shape == model[2].weight.shape
    for name, read in STALE.items():
        if name == "gradient":
            if way == "copied":
                continue  # nobody else reads that one
            with pytest.raises(RuntimeError, match="add_ writes the gradient of parameter 2.weight, whose update"), torch.no_grad():
                read(model[2].weight)
            continue
        with pytest.raises(RuntimeError, match=READS_WITHOUT_WAITING) as raised, torch.no_grad():
            read(model[2].weight)
        assert " 2.weight," in str(raised.value), name
    optimizer.zero_grad()
    backward(model, 1)
    model[2].weight.norm()
    optimizer.step()
    optimizer.synchronize()
    with torch.no_grad():
        for name, read in STALE.items():
            read(model[2].weight)


def test_an_embedding_of_which_other_rows_are_read():
    model = torch.nn.Sequential(torch.nn.Embedding(50000, 16), torch.nn.Linear(16, 2))
    optimizer = adamw(model)
    model(torch.arange(3)).sum().backward()
    optimizer.step()
    model(torch.arange(5))
    F.embedding(torch.tensor([1, 4]), model[0].weight)
    with pytest.raises(RuntimeError, match="embedding uses parameter 0.weight"):
        F.embedding(torch.tensor([1, 5]), model[0].weight)


# Frameworks


class Averaging:
    """A moving average of the weights, as many programs keep it."""

    def __init__(self, model, waits):
        self.model, self.waits = model, waits
        self.average = {n: p.detach().clone() for n, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, optimizer):
        if self.waits:
            optimizer.synchronize()
        for name, p in self.model.named_parameters():
            self.average[name].lerp_(p, 0.1)


@pytest.mark.filterwarnings("ignore")
def test_lightning_with_an_average(tmp_path):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self, overlap):
            super().__init__()
            torch.manual_seed(0)
            self.layers, self.overlap = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16)), overlap

        def training_step(self, rows, _):
            return (self.layers(rows) - rows).square().mean() * 100

        validation_step = training_step

        def configure_optimizers(self):
            return adamw(self, self.overlap, max_grad_norm=None)

    class Average(lightning.Callback):
        def __init__(self, model, waits):
            self.averaging = Averaging(model, waits)

        def on_train_batch_end(self, trainer, *_):
            self.averaging.update(trainer.optimizers[0])

    def fit(overlap, waits):
        module = Module(overlap)
        average = Average(module, waits)
        torch.manual_seed(1)
        rows = torch.utils.data.DataLoader(torch.randn(64, 16), batch_size=8)
        trainer = lightning.Trainer(
            max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=0.3,
            default_root_dir=tmp_path / str(overlap), callbacks=[average],
        )  # fmt: skip
        trainer.fit(module, rows, rows)
        return average.averaging.average, {n: p.tolist() for n, p in module.state_dict().items()}

    torch.testing.assert_close(fit(None, False), fit("forward", True), rtol=0, atol=0)
    with pytest.raises(RuntimeError, match=READS_WITHOUT_WAITING):
        fit("forward", False)


def test_trainer_and_peft(tmp_path):
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    from test_trainer import model, train

    for adapt in (False, True):
        found = []
        for overlap in (None, "forward"):
            trained = model(torch.bfloat16)
            if adapt:
                transformers.set_seed(0)
                trained = peft.get_peft_model(trained, peft.LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"]))
            optimizer = adamw(trained, overlap)
            log = train(trained, optimizer, tmp_path / f"{adapt} {overlap}", save_steps=4, eval_strategy="no")
            assert overlap is None or optimizer._overlap._arrivals is not None
            found.append([log_line["loss"] for log_line in log] + [digest(trained) if not optimizer.synchronize() else None])
        assert found[0] == found[1]


def test_ddp_of_one_process(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        found = []
        for overlap in (None, "forward"):
            torch.manual_seed(0)
            model = torch.nn.parallel.DistributedDataParallel(GPT())
            optimizer = adamw(model, overlap)
            for i in range(6):
                tokens = batch(DATA, i)
                F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
            optimizer.synchronize()
            found.append(digest(model))
            assert overlap is None or not optimizer._overlap._uses.at_step
            optimizer.close()
        assert found[0] == found[1]
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("first", ["compiled", "optimizer"])
def test_compiled_models(first, monkeypatch):
    monkeypatch.delenv("PLIMSOLL_CHECK_OVERLAP")
    found = []
    for overlap in (None, "forward"):
        torch._dynamo.reset()
        model = network()
        if first == "compiled":
            used = torch.compile(model, backend="aot_eager")
            used(torch.ones(8, 16))  # before there are hooks
        optimizer = adamw(model, overlap)
        if first == "optimizer":
            used = torch.compile(model, backend="aot_eager")
        for i in range(6):
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(i))
            used(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        found.append(digest(model))
        # Code that was compiled before does not call the hooks, and all parameters wait in the step.
        assert overlap is None or len(optimizer._overlap._uses.at_step) == (4 if first == "compiled" else 0)
    assert found[0] == found[1]


# Deaths


def test_the_service_is_killed_again_and_again(service, monkeypatch):
    monkeypatch.delenv("PLIMSOLL_CHECK_OVERLAP")

    def trained(overlap, steps, begun=lambda: None, **options):
        torch.manual_seed(0)
        model = GPT(vocabulary=8192, width=128).bfloat16()
        optimizer, losses = adamw(model, overlap, **options), []
        optimizer.open()
        for i in steps:
            loss = model.loss(batch(DATA, i))
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
            begun()
            optimizer.zero_grad()
        optimizer.synchronize()
        return losses, digest(model)

    with killed_again_and_again(service, 4, within=0.05) as killer:
        found = trained("forward", killer.steps(), killer.begun, socket=service.socket)
    assert found == trained(None, range(killer.made))


def gpt_steps(overlap, count, made=lambda step: None, **options):
    """Trains on from where the state is, and calls ``made`` after each step, while its update may run."""
    torch.manual_seed(1)
    model = GPT(vocabulary=2048, width=64).bfloat16()
    optimizer = adamw(model, overlap, **options)
    resumed = optimizer.resumed_step
    for i in range(resumed, count):
        model.loss(batch(DATA, i)).backward()
        optimizer.step()
        made(i - resumed)
        optimizer.zero_grad()
    optimizer.synchronize()
    return resumed, optimizer._shards.step, digest(model)


def test_the_trainer_is_killed_and_started_again(service, monkeypatch):
    """Three times, soon after its fourth step has begun."""
    monkeypatch.delenv("PLIMSOLL_CHECK_OVERLAP")
    for messages in 1, 2, 5:
        trainer = os.fork()  # before there is any optimizer here
        if trainer == 0:
            gpt_steps("forward", 100, lambda made: die_after(messages) if made == 3 else None, socket=service.socket)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(trainer, 0)[1]) == -signal.SIGKILL
    resumed, *found = gpt_steps("forward", 24, socket=service.socket)
    assert 12 <= resumed <= 18
    assert found == list(gpt_steps(None, 24))[1:]
