//go:build linux

package foreign

import (
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/torchtest"
	"plimsoll/internal/state/checkpoint"
	"plimsoll/internal/state/checkpoint/shardtest"
	"plimsoll/internal/state/optim/kernel"
)

// inBitsandbytes makes files of torch.save of the tensors that bitsandbytes had, as testdata/bitsandbytes/make.py has
// printed them: with the states of a parameter beside each other, and wrapped, as newer releases have them.
const inBitsandbytes = `
import sys, torch
states = {}
for line in open(sys.argv[1]):
    kind, name, key, dtype, shape, data = line.split()
    if dtype != "SHA-256":
        dtype = {"torch.uint8": torch.uint8, "torch.float32": torch.float32}[dtype]
        own = states.setdefault(kind, {}).setdefault(name, {})
        own[key] = torch.frombuffer(bytearray.fromhex(data), dtype=dtype).view(eval(shape))
for kind, of in states.items():
    betas = (0.9, 0.999) if kind == "AdamW8bit" else (0.9, 0.99)
    group = {"lr": 0.01, "betas": betas, "params": list(range(len(of)))}
    master = {n: torch.ones_like(s["state1"], dtype=torch.float32) for n, s in of.items()}
    def save(file, states, group=group):
        torch.save({"state": dict(enumerate(states)), "param_groups": [group], "names": list(of), "master": master}, sys.argv[2] + "/" + file)
    save(kind + ".pt", [{"step": 3, **s} for s in of.values()])
    save(kind + "_wrapped.pt", [{"step": 3, "__bnb_optimizer_quant_state__": s} for s in of.values()])
    save(kind + "_norm.pt", [{"step": 3, **s, "unorm_vec": torch.ones(1)} for s in of.values()])
    save(kind + "_blocks.pt", [{"step": 3, **s, **({"absmax1": torch.ones(5)} if "absmax1" in s else {})} for s in of.values()])
    save(kind + "_table.pt", [{"step": 3, **{k: v for k, v in s.items() if k != "qmap1"}} for s in of.values()])
    save(kind + "_betas.pt", [{"step": 3, **s} for s in of.values()], {**group, "betas": (0.9, 0)})
`

// TestBitsandbytes reads 8-bit states of bitsandbytes. Every moment is what bitsandbytes dequantizes.
func TestBitsandbytes(t *testing.T) {
	folder, states := t.TempDir(), filepath.Join("testdata", "bitsandbytes", "states.txt")
	python(t, inBitsandbytes, states, folder)
	for _, name := range []string{"AdamW8bit", "AdamW8bit_wrapped", "Lion8bit", "Lion8bit_wrapped"} {
		c, err := OpenTorch(t.Context(), filepath.Join(folder, name+".pt"), BesideTorch{}, nil)
		if err != nil {
			t.Fatal(err)
		}
		kind, _, _ := strings.Cut(name, "_")
		want := map[string]kernel.Algorithm{"AdamW8bit": kernel.Adam, "Lion8bit": kernel.Lion}[kind]
		if c.Algorithm() != want || c.Step() != 3 || c.Quantized() != "bitsandbytes.optim.optimizer.Optimizer8bit" {
			t.Errorf("%s: %v at step %d, moments of %q", name, c.Algorithm(), c.Step(), c.Quantized())
		}
		compared := 0
		for _, line := range linesIn(t, states) {
			fields := strings.Fields(line)
			if fields[0] != kind || fields[3] != "SHA-256" {
				continue
			}
			compared++
			if got := digestOf(t, c, fields[1], componentRoles[fields[2]]); got != fields[5] {
				t.Errorf("%s: %s of %s is %s, want %s", name, fields[2], fields[1], got, fields[5])
			}
		}
		if compared != 2*want.Moments() {
			t.Errorf("%s: %d moments", name, compared)
		}
	}
	for name, says := range map[string]string{
		"AdamW8bit_norm":   "unorm_vec, which plimsoll's Adam does not have",
		"AdamW8bit_blocks": "4355 numbers with 5 scales", "AdamW8bit_table": "it has no qmap",
		"Lion8bit_betas": "only Lion's is read",
	} {
		_, err := OpenTorch(t.Context(), filepath.Join(folder, name+".pt"), BesideTorch{}, nil)
		shardtest.MustSay(t, err, says, name+".pt")
	}
}

// inTorch trains, saves an optimizer in the forms that trainers have, and each form of an untrained one, whose numbers
// are all 7. It shows the state, and then weights and state after another step.
const inTorch = `
import copy, json, os, sys, torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
kinds = ("AdamW", "SGD", "Adagrad")
def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.LayerNorm(30), torch.nn.Linear(30, 7))
def step(model, optimizer):
    model(torch.ones(5, 40)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
def made(kind, model, named=False):
    of = list(model.named_parameters())
    options = {"momentum": 0.9} if kind == "SGD" else {"betas": (0.8, 0.95)} if kind == "AdamW" else {}
    def own(items): return items if named else [p for _, p in items]
    return getattr(torch.optim, kind)([{"params": own([i for i in of if i[1].dim() > 1])}, {"params": own([i for i in of if i[1].dim() < 2]), "lr": 0.5}], lr=1e-2, **options)
def forms(model, optimizer, named):
    by_name = copy.deepcopy(get_optimizer_state_dict(model, optimizer)) # makes states where there are none
    return {"numbered": optimizer.state_dict(), "given": named.state_dict(), "named": by_name}
def show(model, optimizer):
    return [f"{n} {key} {list(t.shape)} {t.detach().numpy().tobytes().hex()}\n" for n, p in model.named_parameters() for key, t in sorted({"weight": p, **optimizer.state[p]}.items())]
`

// trainsInTorch saves, and continuesInTorch loads what was made of it.
const trainsInTorch = inTorch + `
from safetensors.torch import save_file
for kind in kinds:
    folder = sys.argv[1] + "/" + kind
    os.mkdir(folder)
    model = network()
    optimizer = made(kind, model)
    for _ in range(3):
        step(model, optimizer)
    named = made(kind, model, True)
    named.load_state_dict(optimizer.state_dict())
    for name, saved in forms(model, optimizer, named).items():
        torch.save(saved, f"{folder}/{name}.pt")
        like = copy.deepcopy(saved)
        for group in like["param_groups"]:
            group["lr"] = group["lr"] * 2
        for s in like["state"].values():
            for key, t in s.items():
                s[key] = torch.full_like(t, 7)
        torch.save(like, f"{folder}/{name}_like.pt")
    like["param_groups"][0]["thing"] = torch.zeros(3)
    torch.save(like, f"{folder}/tensor_like.pt")
    like["param_groups"][0].pop("thing")
    like["param_groups"][0]["params"].pop()
    torch.save(like, f"{folder}/fewer_like.pt")
    ordered = [n for g in optimizer.param_groups for p in g["params"] for n, q in model.named_parameters() if p is q]
    json.dump(ordered, open(folder + "/names.json", "w"))
    torch.save(model.state_dict(), folder + "/weights.pt")
    save_file(model.state_dict(), folder + "/weights.safetensors")
    lines = show(model, optimizer)
    for group in optimizer.param_groups:
        group["lr"] *= 2
    step(model, optimizer)
    open(folder + "/want.txt", "w").writelines(lines + show(model, optimizer))
`

const continuesInTorch = inTorch + `
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict
for kind in kinds:
    for form in ("numbered", "given", "named"):
        file = f"{sys.argv[1]}/{kind}/{form}"
        saved, like = (torch.load(file + end, weights_only=True) for end in ("_out.pt", "_like.pt"))
        assert saved["param_groups"] == like["param_groups"], saved["param_groups"]
        model = network()
        optimizer = made(kind, model, form == "given")
        model.load_state_dict(saved["master"])
        if form == "named":
            set_optimizer_state_dict(model, optimizer, {k: saved[k] for k in ("state", "param_groups")})
        else:
            optimizer.load_state_dict(saved)
        lines = show(model, optimizer)
        step(model, optimizer)
        lines += show(model, optimizer)
        want = open(f"{sys.argv[1]}/{kind}/want.txt").readlines()
        lines = [l for l in lines if kind != "SGD" or " step " not in l] # which has none of its own
        print(kind, form, len(lines), lines == want)
`

// TestTorchLike: an optimizer's state comes in from every form in which trainers save it, and goes out in the place of
// another one. torch goes on from it, to the bit.
func TestTorchLike(t *testing.T) {
	all := t.TempDir()
	python(t, trainsInTorch, all)
	var want strings.Builder
	for kind, tensors := range map[string]int{"AdamW": 48, "SGD": 24, "Adagrad": 36} {
		in := func(name string) string { return filepath.Join(all, kind, name) }
		for form, beside := range map[string]BesideTorch{
			"numbered": {Names: in("names.json"), Weights: []string{in("weights.safetensors")}},
			"given":    {Weights: []string{in("weights.pt")}}, "named": {Weights: []string{in("weights.pt")}},
		} {
			c, err := OpenTorch(t.Context(), in(form+".pt"), beside, nil)
			if err != nil {
				t.Fatal(err)
			}
			own := reopened(t, c, checkpoint.Conversion{Ranks: 2})
			to, like := in(form+"_out.pt"), in(form+"_like.pt")
			if err := WriteTorchLike(t.Context(), own, to, like, beside.Names, nil); err != nil {
				t.Fatal(err)
			}
			fmt.Fprintln(&want, kind, form, tensors, "True")
		}
	}
	got := strings.Split(python(t, continuesInTorch, all), "\n")
	lines := strings.Split(want.String(), "\n")
	slices.Sort(got)
	if slices.Sort(lines); !slices.Equal(got, lines) {
		t.Errorf("torch goes on with\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(lines, "\n"))
	}
	refuseLike(t, func(name string) string { return filepath.Join(all, "AdamW", name) })
}

// reopened converts a checkpoint, and opens the result.
func reopened(t *testing.T, c *checkpoint.Checkpoint, to checkpoint.Conversion) *checkpoint.Checkpoint {
	t.Helper()
	path, err := c.Convert(t.Context(), t.TempDir(), to, nil)
	if err != nil {
		t.Fatal(err)
	}
	own, err := checkpoint.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	return own
}

// refuseLike tries what does not fit together.
func refuseLike(t *testing.T, in func(string) string) {
	weights := []string{in("weights.pt")}
	c, err := OpenTorch(t.Context(), in("named.pt"), BesideTorch{Weights: weights}, nil)
	if err != nil {
		t.Fatal(err)
	}
	write(t, in("few.json"), `["0.weight"]`)
	write(t, in("no.json"), `{"0.weight": 1}`)
	write(t, in("other.json"), `["x", "2.weight", "0.bias", "2.bias", "1.weight", "1.bias"]`)
	for name, test := range map[string]struct{ like, names, says string }{
		"no names":       {"numbered_like.pt", "", `no list "names"`},
		"few names":      {"numbered_like.pt", in("few.json"), `1 "names", but 6 parameters`},
		"no list":        {"numbered_like.pt", in("no.json"), "expected a JSON list"},
		"other names":    {"numbered_like.pt", in("other.json"), `parameter "x", which the checkpoint`},
		"needless names": {"named_like.pt", in("names.json"), "names of its own"},
		"tensor option":  {"tensor_like.pt", "", `"thing": it is a tensor`},
		"fewer":          {"fewer_like.pt", "", `parameter "2.weight" is not in the optimizer`},
	} {
		err := WriteTorchLike(t.Context(), c, in("refused.pt"), in(test.like), test.names, nil)
		t.Run(name, func(t *testing.T) { shardtest.MustSay(t, err, test.says) })
	}
	if checkpoint.Exists(in("refused.pt")) {
		t.Error("a file was written")
	}
	for name, beside := range map[string]BesideTorch{
		"it has no tensor": {}, "an earlier file has": {Weights: append(weights, in("weights.safetensors"))},
	} {
		_, err := OpenTorch(t.Context(), in("named.pt"), beside, nil)
		shardtest.MustSay(t, err, name)
	}
}

// TestTemplateOfOtherParameters: no number of a state is left out because a template has no place for it.
func TestTemplateOfOtherParameters(t *testing.T) {
	opened := func(model []shardtest.Tensor) *checkpoint.Checkpoint {
		job := newJob(t, shardtest.SplitFormat, 700, shardtest.CutModel(model, shardtest.Alike(kernel.MomentsFP32)))
		train(t, job, 1, 1)
		c, err := checkpoint.Open(save(t, t.TempDir(), job, ""))
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	all, few := opened(shardtest.SmallModel), opened(shardtest.SmallModel[:4])
	shardtest.MustSay(t, checkTemplate(all, few, "DeepSpeed"),
		`parameter "scale" is not in the checkpoint that is to be like it`)
	shardtest.MustSay(t, checkTemplate(few, all, "DeepSpeed"), `it has the parameter "scale"`)
	if err := checkTemplate(all, all, "DeepSpeed"); err != nil {
		t.Error(err)
	}
}

// inTrainer trains with transformers' Trainer, or resumes. It ends with the bytes of the weights.
const inTrainer = `
import json, os, sys, torch, warnings
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
folder, resume = sys.argv[1], len(sys.argv) > 2
config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
torch.manual_seed(0)
model = LlamaForCausalLM(config)
data = [{"input_ids": [i % 32, 3, 5, 7], "labels": [i % 32, 3, 5, 7]} for i in range(16)]
arguments = TrainingArguments(folder, max_steps=4, save_steps=2, per_device_train_batch_size=2, learning_rate=0.05, weight_decay=0.1, use_cpu=True, report_to=[], disable_tqdm=True, logging_strategy="no")
trainer = Trainer(model, arguments, train_dataset=data)
os.chdir(folder)
trainer.train(resume_from_checkpoint=sys.argv[2] if resume else None)
if not resume:
    exec(open("documented.py").read())
    like = torch.load("checkpoint-2/optimizer.pt", weights_only=True)
    for state in like["state"].values():
        for key, t in state.items():
            state[key] = torch.full_like(t, 7)
    torch.save(like, "like.pt")
for n, p in sorted(trainer.model.named_parameters()):
    print("=", n, p.detach().numpy().tobytes().hex())
`

// TestTrainer: state of Hugging Face's Trainer comes in, and goes back in the place of another one. Trainer resumes,
// and ends with the same bits as without the journey.
func TestTrainer(t *testing.T) {
	if testing.Short() {
		t.Skip("TestTorchLike goes the same way without transformers, whose import takes seconds")
	}
	folder := t.TempDir()
	interpreter := torchtest.Imported(t, "transformers.trainer", "transformers.models.llama.modeling_llama",
		"accelerate")
	write(t, filepath.Join(folder, "documented.py"), documented(t, "names.json"))
	run := func(arguments ...string) string {
		out := outputOf(t, interpreter, inTrainer, append([]string{folder}, arguments...)...)
		_, shown, _ := strings.Cut(out, "= ")
		return shown
	}
	want := run()
	saved := filepath.Join(folder, "checkpoint-2")
	names := filepath.Join(folder, "names.json")
	beside := BesideTorch{Names: names, Weights: []string{filepath.Join(saved, "model.safetensors")}}
	c, err := OpenTorch(t.Context(), filepath.Join(saved, "optimizer.pt"), beside, nil)
	if err != nil {
		t.Fatal(err)
	}
	own := reopened(t, c, checkpoint.Conversion{})
	out := filepath.Join(folder, "resumed")
	if err := os.CopyFS(out, os.DirFS(saved)); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(out, "optimizer.pt")); err != nil {
		t.Fatal(err)
	}
	like := filepath.Join(folder, "like.pt")
	if err := WriteTorchLike(t.Context(), own, filepath.Join(out, "optimizer.pt"), like, names, nil); err != nil {
		t.Fatal(err)
	}
	if got := run(out); got != want || len(want) < 1000 {
		t.Errorf("Trainer ends with other weights: %.80s, want %.80s", got, want)
	}
}

// inMegatron writes a checkpoint as Megatron's, with layers, experts, bf16 weights, and arguments that no reader knows.
// Or it compares one with two others: states are those of the first, and all else is the second's.
const inMegatron = `
import argparse, os, sys, warnings, torch, torch.distributed.checkpoint as dcp
warnings.filterwarnings("ignore")
def read(path):
    saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {k: torch.empty(v.size, dtype=v.properties.dtype) for k, v in saved.items() if hasattr(v, "size")}
    dcp.load(tensors, checkpoint_id=path, no_dist=True)
    return tensors, torch.load(path + "/common.pt", weights_only=False)
shapes = {"embedding.weight": (9, 5), "decoder.layers.fc.weight": (2, 6, 5), "decoder.layers.mlp.experts.experts.fc1.weight": (2, 3, 4, 5), "decoder.norm.weight": (5,)}
if sys.argv[1] == "write":
    for path, step, seed in ((sys.argv[2], 300, 0), (sys.argv[3], 7, 1)):
        torch.manual_seed(seed)
        state = {"rng": torch.randint(99, (50,)), "decoder.extra/shard_0_1": [1, 2]}
        for i, (name, shape) in enumerate(shapes.items()):
            prefix = f"chained_{i % 2}.optimizer.state."
            state[prefix + "param." + name] = torch.randn(shape)
            for component in ("exp_avg", "exp_avg_sq"):
                state[prefix + component + "." + name] = torch.rand(shape)
            state[name] = state[prefix + "param." + name].to(torch.float32 if "norm" in name else torch.bfloat16)
        dcp.save(state, checkpoint_id=path, no_dist=True)
        open(path + "/metadata.json", "w").write('{"sharded_backend": "torch_dist"}')
        def group(i): return {"lr": 0.1 * step, "wd_mult": float(i), "step": step, "betas": (0.9, 0.95)}
        args = argparse.Namespace(lr=0.5 + seed, device=torch.device("cpu"), steps=step)
        chained = {i: {"optimizer": {"param_groups": [group(0), group(1)]}, "grad_scaler": {"n": seed}} for i in range(2)}
        torch.save({"args": args, "optimizer": chained, "iteration": step, "seed": torch.arange(seed + 3)}, path + "/common.pt")
else:
    (source, of), (like, common), (got, out) = map(read, sys.argv[2:])
    for key, t in got.items():
        want = like[key] if key == "rng" else source[key]
        assert torch.equal(t, want) and t.dtype == want.dtype, key
    assert len(got) == 17 and vars(out["args"]) == vars(common["args"]) and out["iteration"] == 7
    for chained in out["optimizer"].values():
        for group in chained["optimizer"]["param_groups"]:
            assert group.pop("step") == 300, group
    for chained in common["optimizer"].values():
        for group in chained["optimizer"]["param_groups"]:
            del group["step"]
    assert out["optimizer"] == common["optimizer"] and torch.equal(out["seed"], common["seed"])
    print("as it shall be")
`

// TestMegatronLike: state goes out in the place of Megatron's own. PyTorch reads it there, and all else is as it was.
func TestMegatronLike(t *testing.T) {
	folder := t.TempDir()
	source, like := filepath.Join(folder, "source"), filepath.Join(folder, "iter_0000007")
	python(t, inMegatron, "write", source, like)
	c, err := OpenMegatron(t.Context(), source, nil)
	if err != nil {
		t.Fatal(err)
	}
	const expert = "decoder.layers.1.mlp.experts.local_experts.2.fc1.weight"
	if p, _ := c.Piece(expert); len(c.Names()) != 10 || !slices.Equal(p.Shape, []int64{4, 5}) {
		t.Errorf("%v, %+v", c.Names(), p)
	}
	split := kernel.Split
	own, out := reopened(t, c, checkpoint.Conversion{Ranks: 3, State: &split}), filepath.Join(folder, "out")
	if err := WriteMegatron(t.Context(), own, out, like, nil); err != nil {
		t.Fatal(err)
	}
	got := python(t, inMegatron, "compare", source, like, filepath.Join(out, "iter_0000007"))
	if text := linesIn(t, filepath.Join(out, latestName)); got != "as it shall be\n" || text[0] != "7" {
		t.Error(got, text)
	}
	shardtest.MustSay(t, WriteMegatron(t.Context(), own, out, like, nil), "is here already")
	other := filepath.Join("../../../..", "examples", "megatron")
	shardtest.MustSay(t, WriteMegatron(t.Context(), own, t.TempDir(), other, nil), "which the checkpoint",
		"does not have")
}

// TestMegatronIntoOtherCuts: the parts of tensor parallel ranks, and flattened ones, are filled from each other.
func TestMegatronIntoOtherCuts(t *testing.T) {
	example := filepath.Join("../../../..", "examples", "megatron")
	flattened := filepath.Join("testdata", "megatron", "flattened")
	for from, like := range map[string]string{example: flattened, flattened: example} {
		c, err := OpenMegatron(t.Context(), from, nil)
		if err != nil {
			t.Fatal(err)
		}
		out := t.TempDir()
		if err := WriteMegatron(t.Context(), c, out, like, nil); err != nil {
			t.Fatal(err)
		}
		got, err := OpenMegatron(t.Context(), out, nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range c.Names() {
			for component, role := range componentRoles {
				if digestOf(t, got, name, role) != digestOf(t, c, name, role) {
					t.Errorf("%s of %s is not that of %s", component, name, from)
				}
			}
		}
	}
}

// TestRoundToBF16 rounds as PyTorch does: to nearest, and ties to even.
func TestRoundToBF16(t *testing.T) {
	for from, to := range map[uint32]uint16{
		0x3f800000: 0x3f80, 0x3f808000: 0x3f80, 0x3f818000: 0x3f82, 0x3f808001: 0x3f81, 0xff7fffff: 0xff80,
		0x7f800001: 0x7fc0,
	} {
		got := binary.LittleEndian.Uint16(roundTo(dtype.BF16, nil, binary.LittleEndian.AppendUint32(nil, from)))
		if got != to {
			t.Errorf("%#x is %#x, want %#x", from, got, to)
		}
	}
}

// inOtherFSDP trains with optimizers other than AdamW and saves, or loads, with torch.distributed.checkpoint. It makes
// a step after each, and shows weights and states.
const inOtherFSDP = ranksOf + `
import torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (world,))
class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr): super().__init__(params, {"lr": lr})
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                    p.add_(m.mul(0.9).add(p.grad, alpha=0.1).sign(), alpha=-group["lr"])
                    m.lerp_(p.grad, 0.01)
made = {
    "Lion": lambda g: Lion(g, 1e-2), "SGD": lambda g: torch.optim.SGD(g, 1e-2, momentum=0.9, foreach=False),
    "Adagrad": lambda g: torch.optim.Adagrad(g, 1e-2, foreach=False), "Muon": lambda g: torch.optim.Muon(g[:1], 1e-2),
}
def step():
    torch.manual_seed(7)
    model(torch.randn(5, 40)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
for kind, make in made.items():
    path = sys.argv[1] + "/" + kind
    torch.manual_seed(0)
    model = network()
    if kind != "Muon":
        fully_shard(model, mesh=mesh)
    optimizer = make(groups(model))
    if sys.argv[2] == "save":
        for _ in range(3):
            step()
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": state}, checkpoint_id=path)
    elif kind != "Muon":
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optim": {"state": state["state"]}}, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    for _ in range(2 if kind != "Muon" else 0):
        for n, p in model.named_parameters():
            show(kind + " " + n, *(x.full_tensor() if hasattr(x, "full_tensor") else x for x in (p, *(v for k, v in sorted(optimizer.state[p].items()) if k != "step"))))
        step()
end()
`

// TestOtherOptimizersGoAround: state of Lion, SGD and Adagrad comes in from FSDP2 and goes back. It goes on from there
// with the same bits.
func TestOtherOptimizersGoAround(t *testing.T) {
	interpreter, saved, out := withTorch(t), t.TempDir(), t.TempDir()
	want := twoOf(t, interpreter, inOtherFSDP, saved, "save")
	for kind, algorithm := range map[string]kernel.Algorithm{
		"Lion": kernel.Lion, "SGD": kernel.SGD, "Adagrad": kernel.Adagrad,
	} {
		c, err := OpenDistributed(t.Context(), filepath.Join(saved, kind), nil)
		if err != nil {
			t.Fatal(err)
		}
		if c.Algorithm() != algorithm || kind == "Adagrad" && c.Step() != 3 {
			t.Errorf("%s: %v at step %d", kind, c.Algorithm(), c.Step())
		}
		own := reopened(t, c, checkpoint.Conversion{Ranks: 3})
		if err := WriteDistributed(t.Context(), own, filepath.Join(out, kind), nil); err != nil {
			t.Fatal(err)
		}
	}
	if got := twoOf(t, interpreter, inOtherFSDP, out, "load"); len(want) != 72 || !slices.Equal(got, want) {
		t.Errorf("torch goes on with %d tensors, which are not the %d that it would have had", len(got), len(want))
	}
	_, err := OpenDistributed(t.Context(), filepath.Join(saved, "Muon"), nil) // whose momentum has the name of SGD's
	shardtest.MustSay(t, err, "it is the state of Muon")
}

// inMuon saves the state of DeepSpeed's Muon as torch.save and as ZeRO do, and that of an optimizer whose options are
// neither Muon's nor SGD's.
const inMuon = `
import os, sys, torch
from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam
os.chdir(sys.argv[1])
def save(file, optimizer):
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    names = [n for g in optimizer.param_groups for q in g["params"] for n, p in model.named_parameters() if p is q]
    torch.save({**state, "names": names, "master": {n: p.detach() for n, p in model.named_parameters()}}, file)
    return state
model = torch.nn.Linear(8, 8)
muon = {"params": [model.weight], "use_muon": True, "lr": 0.1, "momentum": 0.9, "weight_decay": 0.0}
adam = {"params": [model.bias], "use_muon": False, "lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
save("mixed.pt", MuonWithAuxAdam([muon, adam]))
state = save("muon.pt", MuonWithAuxAdam([muon]))
save("sgd.pt", torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
class Other(torch.optim.SGD):
    def state_dict(self):
        state = super().state_dict()
        del state["param_groups"][0]["dampening"]
        return state
save("other.pt", Other(model.parameters(), lr=0.1, momentum=0.9))
os.mkdir("zero")
own = {"zero_stage": 3, "partition_count": 1, "fp32_flat_groups": [model.weight.detach().flatten()], "optimizer_state_dict": state}
torch.save({"optimizer_state_dict": own}, "zero/zero_pp_rank_0_mp_rank_00_optim_states.pt")
torch.save({"param_shapes": [{"weight": torch.Size([8, 8])}]}, "zero/zero_pp_rank_0_mp_rank_00_model_states.pt")
`

// TestMuonIsNotSGD: momentum that has the name of SGD's is refused, if the options are those of another optimizer.
func TestMuonIsNotSGD(t *testing.T) {
	folder := t.TempDir()
	outputOf(t, withDeepSpeed(t), inMuon, folder)
	for name, says := range map[string]string{
		"mixed": errMuon.Error(), "muon": errMuon.Error(), "other": "have no option dampening",
	} {
		_, err := OpenTorch(t.Context(), filepath.Join(folder, name+".pt"), BesideTorch{}, nil)
		shardtest.MustSay(t, err, says)
	}
	if _, err := OpenTorch(t.Context(), filepath.Join(folder, "sgd.pt"), BesideTorch{}, nil); err != nil {
		t.Error(err)
	}
	_, err := OpenDeepSpeed(t.Context(), filepath.Join(folder, "zero"), nil)
	shardtest.MustSay(t, err, errMuon.Error())
}
