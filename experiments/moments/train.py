"""Trains a small character-level transformer, with the optimizer step done by
torch.optim.AdamW, by Plimsoll's kernels with moments of some type, or with
FlashOptim's codes, and writes the losses as CSV.

    python train.py --optimizers torch,fp32,bf16,int8,flash --output losses.csv
    python train.py --optimizers split/fp32,split24/int8 --output masters.csv

README.md beside this file says why.
"""

import argparse
import csv
import math
import pathlib
import random
import subprocess
import sys
import tempfile

import torch
from torch import nn
from torch.nn import functional

CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 128, 128, 4, 2, 8
PEAK_RATE, WARMUP, WEIGHT_DECAY, CLIP = 2e-3, 20, 0.1, 1.0
EVALUATE_EVERY, EVALUATION_BATCHES = 25, 6
HERE = pathlib.Path(__file__).resolve().parent


def make_text(length, seed):
    """A ship's log with some grammar and some arithmetic in it, so that there is
    more to learn than the frequencies of letters."""
    pick = random.Random(seed)
    parts, size = [], 0
    while size < length:
        cargo = pick.choice(["tea", "wool", "coal", "grain", "copper", "timber", "salt", "rum"])
        port = pick.choice(["Bombay", "Lisbon", "Hull", "Odessa", "Valparaiso", "Canton", "Oporto", "Riga"])
        ship = pick.choice(["Ariel", "Taeping", "Serica", "Fiery Cross", "Taitsing", "Cutty Sark"])
        held, loaded = pick.randrange(2, 60), pick.randrange(2, 40)
        sentence = pick.choice([
            f"The {ship} lay at {port} and held {held} tons of {cargo}; she loaded {loaded} and held {held + loaded}. ",
            f"From {port} the {ship} carried {held + loaded} tons of {cargo}, put {loaded} ashore and kept {held}. ",
            f"At {port} they weighed the {cargo}: {held} and {loaded} make {held + loaded}, said the mate of the {ship}. ",
        ])
        parts.append(sentence)
        size += len(sentence)
    return "".join(parts)[:length]


class Data:
    def __init__(self):
        text = make_text(400_000, seed=1)
        alphabet = sorted(set(text))
        self.vocabulary = len(alphabet)
        code = {character: i for i, character in enumerate(alphabet)}
        self.training = torch.tensor([code[c] for c in text])
        held_out = torch.tensor([code[c] for c in make_text(EVALUATION_BATCHES * BATCH * (CONTEXT + 1), seed=2)])
        self.held_out = held_out.view(EVALUATION_BATCHES, BATCH, CONTEXT + 1)

    def batch(self, generator):
        starts = torch.randint(len(self.training) - CONTEXT - 1, (BATCH, 1), generator=generator)
        return self.training[starts + torch.arange(CONTEXT + 1)]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.inputs, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.perceptron = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        batch, length, _ = x.shape
        heads = self.inputs(self.norm1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.perceptron(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        self.characters, self.places = nn.Embedding(vocabulary, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary)
        for embedding in self.characters, self.places:
            nn.init.normal_(embedding.weight, std=0.02)

    def loss(self, batch):
        x = self.characters(batch[:, :-1]) + self.places.weight
        logits = self.head(self.norm(self.blocks(x)))
        return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


class TorchStepper:
    """The reference: torch.optim.AdamW over one flat parameter."""

    def __init__(self, elements):
        self.parameters = torch.zeros(elements)
        self.gradients = torch.zeros(elements)
        self.flat = nn.Parameter(self.parameters)
        self.flat.grad = self.gradients
        self.optimizer = torch.optim.AdamW([self.flat], weight_decay=WEIGHT_DECAY)

    def step(self, rate):
        nn.utils.clip_grad_norm_([self.flat], CLIP)
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()

    def close(self):
        pass


def whole(x):
    """Rounds to nearest, halves up."""
    return torch.floor(x + 0.5)


class FlashStepper:
    """AdamW whose state is held in the codes of FlashOptim (arXiv 2602.23349):
    moments in a byte each with two fp16 scales for 32 elements, and, with
    corrections, a bf16 parameter and a byte that corrects it."""

    GROUP = 32

    def __init__(self, elements, corrected):
        self.parameters, self.gradients = torch.zeros(elements), torch.zeros(elements)
        room = -(-elements // self.GROUP) * self.GROUP
        self.first, self.second = torch.zeros(room), torch.zeros(room)
        self.master = None
        self.corrected, self.steps = corrected, 0

    def step(self, rate):
        self.steps += 1
        g = self.gradients.bfloat16().float() if self.corrected else self.gradients
        g = g * min(1.0, CLIP / (g.norm().item() + 1e-6))
        if self.master is None:
            self.master = self.hold(self.parameters) if self.corrected else self.parameters
        elements = len(g)
        m = self.first[:elements].lerp_(g, 0.1)
        v = self.second[:elements].mul_(0.999).addcmul_(g, g, value=0.001)
        p = self.master.mul_(1 - rate * WEIGHT_DECAY)
        root = (v / (1 - 0.999**self.steps)).sqrt_().add_(1e-8)
        p.addcdiv_(m, root, value=-rate / (1 - 0.9**self.steps))
        self.first, self.second = self.round_first(self.first), self.round_second(self.second)
        if self.corrected:
            self.master = self.hold(p)
            self.parameters.copy_(p.bfloat16())

    def scales(self, x):
        groups = x.view(-1, self.GROUP)
        most = groups.abs().amax(dim=1, keepdim=True).clamp(min=1e-12)
        return groups, most, most.half().float()

    def round_first(self, m):
        groups, most, scale = self.scales(m)
        x = groups / most
        y = whole(2 * x / (1 + x.abs()) * 127) / 127
        return (y / (2 - y.abs()) * scale).flatten()

    def round_second(self, v):
        groups, most, scale = self.scales(v.sqrt())
        return (whole(groups / most * 255) / 255 * scale).square().flatten()

    @staticmethod
    def hold(p):
        """What a bf16 number and 255 steps over its last digit hold of p."""
        narrow = p.bfloat16().float()
        half = torch.ldexp(torch.ones_like(p), torch.frexp(narrow).exponent - 9)  # of its last digit
        part = ((p - narrow) / half).clamp(-1, 1) * 127
        return narrow + torch.copysign(whole(part.abs()), part) / 127 * half

    def close(self):
        pass


class PlimsollStepper:
    """The command in step/, which maps the file that holds parameters and
    gradients, too, and updates the parameters in place."""

    def __init__(self, elements, command, masters, moments):
        self.file = tempfile.NamedTemporaryFile()
        self.file.truncate(8 * elements)
        both = torch.from_file(self.file.name, shared=True, size=2 * elements, dtype=torch.float32)
        self.parameters, self.gradients = both[:elements], both[elements:]
        self.process = subprocess.Popen(
            [*command, "-masters", masters, "-moments", moments, "-weight-decay", str(WEIGHT_DECAY), "-clip", str(CLIP), self.file.name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, cwd=HERE)

    def step(self, rate):
        self.process.stdin.write(f"step {rate!r}\n")
        answer = self.process.stdout.readline()
        if answer != "ok\n":
            sys.exit(f"the optimizer step failed: {answer}")

    def close(self):
        self.process.stdin.close()
        if self.process.wait() != 0:
            sys.exit(f"the optimizer command ended with exit code {self.process.returncode}")
        self.file.close()


def learning_rate(step, steps):
    """Warms up, then falls along a cosine to a tenth."""
    if step <= WARMUP:
        return PEAK_RATE * step / WARMUP
    progress = (step - WARMUP) / max(1, steps - WARMUP)
    return PEAK_RATE * (0.55 + 0.45 * math.cos(math.pi * progress))


def move(model, stepper):
    """Makes the stepper's memory the memory of the model's parameters and
    gradients."""
    first = 0
    for p in model.parameters():
        place = slice(first, first + p.numel())
        stepper.parameters[place] = p.detach().flatten()
        p.data = stepper.parameters[place].view_as(p)
        p.grad = stepper.gradients[place].view_as(p)
        first = place.stop


def make_stepper(optimizer, elements, command):
    if optimizer == "torch":
        return TorchStepper(elements)
    if optimizer in ("flash", "flash24"):
        return FlashStepper(elements, corrected=optimizer == "flash24")
    masters, _, moments = optimizer.rpartition("/")
    return PlimsollStepper(elements, command, masters or "fp32", moments)


def train(data, optimizer, seed, steps, command):
    """Yields step, training loss and, at some steps, the loss on text that is
    held out."""
    torch.manual_seed(seed)
    model = Transformer(data.vocabulary)
    elements = sum(p.numel() for p in model.parameters())
    stepper = make_stepper(optimizer, elements, command)
    move(model, stepper)
    generator = torch.Generator().manual_seed(seed)
    for step in range(1, steps + 1):
        stepper.gradients.zero_()
        loss = model.loss(data.batch(generator))
        loss.backward()
        stepper.step(learning_rate(step, steps))
        held_out = None
        if step % EVALUATE_EVERY == 0 or step == steps:
            with torch.no_grad():
                held_out = sum(model.loss(batch).item() for batch in data.held_out) / EVALUATION_BATCHES
        yield step, loss.item(), held_out
    stepper.close()


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--optimizers", default="torch,fp32,bf16,int8", 
                           help="torch, flash, flash24, types of moments, or MASTERS/MOMENTS; default %(default)s")
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--steps", type=int, default=300)
    arguments.add_argument("--step-command", help="a built step command; default: go run ./step")
    arguments.add_argument("--output", default="losses.csv")
    chosen = arguments.parse_args()
    command = [chosen.step_command] if chosen.step_command else ["go", "run", "./step"]
    torch.set_num_threads(1)  # the same sums on every machine, and no waiting on a busy one
    data = Data()
    with open(chosen.output, "w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["optimizer", "seed", "step", "training_loss", "held_out_loss"])
        for seed in range(1, chosen.seeds + 1):
            for optimizer in chosen.optimizers.split(","):
                for step, loss, held_out in train(data, optimizer, seed, chosen.steps, command):
                    table.writerow([optimizer, seed, step, f"{loss:.6f}", "" if held_out is None else f"{held_out:.6f}"])
                file.flush()
                print(f"{optimizer} seed {seed}: loss {held_out:.4f} on held-out text", file=sys.stderr)


if __name__ == "__main__":
    main()
