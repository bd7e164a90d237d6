"""Draws what train.py measured, as SVG, and prints the table of README.md.

    python plot.py losses.csv losses.svg

The first optimizer of the file is the reference. With --within PERCENT the
program fails if the mean loss of another is further above it.
"""

import argparse
import collections
import csv
import math
import statistics
import sys

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 420, 60, 200, 20, 50
FLOOR = 1e-7  # differences below it are drawn on it
COLOURS = ["#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22"]


def read(path):
    """Losses by optimizer and seed: lists over steps, and the last ones on
    held-out text."""
    training, held_out = collections.defaultdict(list), {}
    with open(path) as file:
        for row in csv.DictReader(file):
            run = row["optimizer"], int(row["seed"])
            training[run].append(float(row["training_loss"]))
            if row["held_out_loss"]:
                held_out[run] = float(row["held_out_loss"])
    return training, held_out


def lines(training, optimizers, seeds):
    """Label -> a value for each step."""
    steps = range(len(training[optimizers[0], seeds[0]]))
    first = optimizers[0]
    reference = [[training[first, seed][step] for seed in seeds] for step in steps]
    yield f"loss, {first}", [statistics.mean(losses) for losses in reference]
    if len(seeds) > 1:
        yield f"spread over seeds, {first}", [statistics.stdev(losses) for losses in reference]
    for optimizer in optimizers:
        if optimizer != first:
            yield f"{optimizer}, distance", [
                statistics.mean(abs(training[optimizer, seed][step] - training[first, seed][step]) for seed in seeds)
                for step in steps]


def draw(curves):
    steps = len(curves[0][1])
    top = math.ceil(math.log10(max(max(values) for _, values in curves)))
    bottom = math.log10(FLOOR)

    def place(step, value):
        x = LEFT + (WIDTH - LEFT - RIGHT) * step / steps
        y = TOP + (HEIGHT - TOP - BOTTOM) * (top - math.log10(max(value, FLOOR))) / (top - bottom)
        return f"{x:.1f},{y:.1f}"

    def text(position, words, anchor="end", colour="#333"):
        x, y = position.split(",")
        return f'<text x="{x}" y="{y}" dy="4" text-anchor="{anchor}" fill="{colour}">{words}</text>'

    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">'
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    for power in range(round(bottom), top + 1):
        x, y = place(0, 10.0**power).split(",")
        yield f'<path d="M{x},{y}H{WIDTH - RIGHT}" stroke="#ddd"/>'
        yield text(f"{LEFT - 8},{y}", f"{10.0**power:g}")
    for step in range(0, steps + 1, max(1, steps // 4)):
        x, _ = place(step, 1).split(",")
        yield text(f"{x},{HEIGHT - BOTTOM + 18}", step, "middle")
    yield text(f"{(LEFT + WIDTH - RIGHT) / 2},{HEIGHT - 12}", "step", "middle")
    for number, ((label, values), colour) in enumerate(zip(curves, COLOURS)):
        points = " ".join(place(step, value) for step, value in enumerate(values, start=1))
        yield f'<polyline points="{points}" fill="none" stroke="{colour}"/>'
        yield text(f"{WIDTH - RIGHT + 10},{TOP + 10 + 20 * number}", label, "start", colour)
    yield "</svg>"


def table(held_out, optimizers, seeds):
    yield f"| optimizer | loss on held-out text | over seeds ± | minus {optimizers[0]}, same seed: mean | largest |"
    yield "|---|---|---|---|---|"
    for optimizer in optimizers:
        losses = [held_out[optimizer, seed] for seed in seeds]
        differences = [held_out[optimizer, seed] - held_out[optimizers[0], seed] for seed in seeds]
        spread = statistics.stdev(losses) if len(seeds) > 1 else math.nan
        yield (f"| {optimizer} | {statistics.mean(losses):.4f} | {spread:.4f} "
               f"| {statistics.mean(differences):+.6f} | {max(differences, key=abs):+.6f} |")


def too_high(held_out, optimizers, seeds, percent):
    """The optimizers whose mean loss is further above the first one's."""
    means = {o: statistics.mean(held_out[o, seed] for seed in seeds) for o in optimizers}
    reference = means[optimizers[0]]
    return [o for o in optimizers if means[o] > (1 + percent / 100) * reference]


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("losses")
    arguments.add_argument("drawing")
    arguments.add_argument("--within", type=float, metavar="PERCENT")
    chosen = arguments.parse_args()
    training, held_out = read(chosen.losses)
    optimizers = list(dict.fromkeys(optimizer for optimizer, _ in training))
    seeds = sorted({seed for _, seed in training})
    with open(chosen.drawing, "w") as file:
        file.write("\n".join(draw(list(lines(training, optimizers, seeds)))) + "\n")
    print("\n".join(table(held_out, optimizers, seeds)))
    if chosen.within is not None and (high := too_high(held_out, optimizers, seeds, chosen.within)):
        sys.exit(f"{', '.join(high)}: the loss is more than {chosen.within:g} % above that of {optimizers[0]}")


if __name__ == "__main__":
    main()
