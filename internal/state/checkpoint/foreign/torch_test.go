//go:build linux

package foreign

import (
	"archive/zip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/torchtest"
	"plimsoll/internal/state/checkpoint"
	"plimsoll/internal/state/checkpoint/shardtest"
	"plimsoll/internal/state/optim/kernel"
)

// python runs a program that must succeed, and returns its output.
func python(t *testing.T, program string, arguments ...string) string {
	t.Helper()
	return outputOf(t, withTorch(t), program, arguments...)
}

// withTorch is the interpreter of programs that import torch.
func withTorch(t *testing.T) *torchtest.Forks {
	t.Helper()
	// The first optimizer of a process imports torch._dynamo.
	return torchtest.Imported(t, "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict",
		"safetensors.torch", "torch._dynamo")
}

// outputOf runs a program that must succeed, and returns its output.
func outputOf(t *testing.T, interpreter *torchtest.Forks, program string, arguments ...string) string {
	t.Helper()
	out, err := interpreter.Output(append([]string{"-c", program}, arguments...)...)
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// continueInTorch loads the file as a user would, and goes on training.
const continueInTorch = `
import sys, torch
saved = torch.load(sys.argv[1], weights_only=True)
mapped = torch.load(sys.argv[1], weights_only=True, mmap=True)
assert all(torch.equal(saved["master"][n], mapped["master"][n]) for n in saved["names"])
for i, n in enumerate(saved["names"]):
    for tensor in (saved["master"][n], saved["state"][i]["exp_avg"], saved["state"][i]["exp_avg_sq"]):
        print(n, list(tensor.shape), tensor.numpy().tobytes().hex())
parameters = [torch.nn.Parameter(saved["master"][n].clone()) for n in saved["names"]]
groups = [{"params": [parameters[i] for i in g["params"]]} for g in saved["param_groups"]]
optimizer = torch.optim.AdamW(groups, lr=1e-3)
own = optimizer.state_dict()["param_groups"]
optimizer.load_state_dict({"state": saved["state"], "param_groups": [{**a, "params": b["params"]} for a, b in zip(own, saved["param_groups"])]})
for p in parameters:
    p.grad = torch.ones_like(p)
optimizer.step()
for p in parameters:
    assert optimizer.state[p]["step"] == float(sys.argv[2]) + 1, optimizer.state[p]
`

func TestTorchGoesOnFromAnExport(t *testing.T) {
	f := shardtest.Format(kernel.Adam, kernel.Split, kernel.MomentsFP32, shardtest.SplitFormat.Parameter)
	job := newJob(t, f, 700, shardtest.CutModel(shardtest.SmallModel, shardtest.Alike(f.Moments), 9000, 11700))
	train(t, job, 5, 3)
	path := save(t, t.TempDir(), job, "")
	c, err := checkpoint.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	exported := filepath.Join(t.TempDir(), "optimizer.pt")
	var told int64
	if err := WriteTorch(t.Context(), c, exported, func(bytes int64) { told += bytes }); err != nil {
		t.Fatal(err)
	}
	if told != BytesOfTorch(c) {
		t.Errorf("progress was told of %d bytes, expected %d", told, BytesOfTorch(c))
	}
	checkAlignment(t, exported)
	comeBack(t, exported, job)
	got := strings.Split(strings.TrimSpace(python(t, continueInTorch, exported, "3")), "\n")
	want := linesOf(job)
	if len(got) != len(want) {
		t.Fatalf("%d tensors, want %d", len(got), len(want))
	}
	for _, line := range got {
		if !want[line] {
			t.Errorf("%.60s... is not what was saved", line)
		}
	}
}

// TestNothingAmongTemporaryFiles: the leftover of a crash lies in the folder that is
// written to, not among the system's temporary files.
func TestNothingAmongTemporaryFiles(t *testing.T) {
	temporary, directory := t.TempDir(), t.TempDir()
	t.Setenv("TMPDIR", temporary)
	if err := os.Chtimes(temporary, time.Unix(1, 0), time.Unix(1, 0)); err != nil {
		t.Fatal(err)
	}
	c, err := checkpoint.Open(save(t, directory, newJob(t, shardtest.SplitFormat, 700,
		shardtest.CutModel(shardtest.SmallModel, shardtest.Alike(kernel.MomentsFP32))), ""))
	if err == nil {
		err = WriteTorch(t.Context(), c, filepath.Join(directory, "optimizer.pt"), nil)
	}
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(temporary); err != nil || !info.ModTime().Equal(time.Unix(1, 0)) {
		t.Errorf("a file was made in %s (%v)", temporary, err)
	}
}

// TestWriteTorchOverWhatIsNoFile: a folder is refused before anything is written. A device
// is not replaced, nor a link to one.
func TestWriteTorchOverWhatIsNoFile(t *testing.T) {
	c, err := checkpoint.Open(filepath.Join("../../../..", "examples", "checkpoints"))
	if err != nil {
		t.Fatal(err)
	}
	device := filepath.Join(t.TempDir(), "stdout")
	if err := os.Symlink(os.DevNull, device); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{t.TempDir(), device} {
		err := WriteTorch(t.Context(), c, path, func(int64) { t.Errorf("%s: numbers were written", path) })
		shardtest.MustSay(t, err, path, "a file cannot replace the folder or device here")
	}
	if to, err := os.Readlink(device); err != nil || to != os.DevNull {
		t.Errorf("%s is %q now (%v)", device, to, err)
	}
}

const firstStepInTorch = `
import sys, torch
saved = torch.load(sys.argv[1], weights_only=True)
parameters = [torch.nn.Parameter(saved["master"][n].clone()) for n in saved["names"]]
optimizer = torch.optim.SGD(parameters, lr=1, momentum=0.9, dampening=0.5)
optimizer.load_state_dict({**saved, "param_groups": optimizer.state_dict()["param_groups"]})
for p in parameters:
    p.grad = torch.ones_like(p)
optimizer.step()
print(all(torch.equal(p.data, saved["master"][n] - 1) for p, n in zip(parameters, saved["names"])))
`

// TestTorchMakesTheFirstStep from an export: torch does not dampen it. With a momentum in
// the export, it would.
func TestTorchMakesTheFirstStep(t *testing.T) {
	job := newJob(t, shardtest.Format(kernel.SGD, kernel.Split, kernel.MomentsFP32, dtype.BF16), 700,
		shardtest.CutModel([]shardtest.Tensor{{"a", []int64{7, 3}, 0}, {"b", []int64{5}, 0}},
			shardtest.Alike(kernel.MomentsFP32)))
	train(t, job, 1, 0)
	c, err := checkpoint.Open(save(t, t.TempDir(), job, ""))
	if err != nil {
		t.Fatal(err)
	}
	exported := filepath.Join(t.TempDir(), "optimizer.pt")
	var told int64
	if err := WriteTorch(t.Context(), c, exported, func(bytes int64) { told += bytes }); err != nil ||
		told != BytesOfTorch(c) {
		t.Fatalf("%v after %d of %d bytes", err, told, BytesOfTorch(c))
	}
	if got := python(t, firstStepInTorch, exported); got != "True\n" {
		t.Errorf("the first step was dampened: %s", got)
	}
}

// comeBack converts the export back, and compares it with the saved state.
func comeBack(t *testing.T, exported string, job []checkpoint.Shard) {
	c, err := OpenTorch(t.Context(), exported, BesideTorch{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	path, err := c.Convert(t.Context(), t.TempDir(), checkpoint.Conversion{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	others := newJob(t, shardtest.SplitFormat, 500,
		shardtest.CutModel(shardtest.SmallModel, shardtest.Alike(kernel.MomentsFP32), 9000, 11700))
	load(t, path, others)
	for rank := range job {
		shardtest.EqualState(t, bytesOfState(others[rank]), bytesOfState(job[rank]))
	}
}

// checkAlignment compares the storages with those of torch's own writer.
func checkAlignment(t *testing.T, path string) {
	archive, err := zip.OpenReader(path)
	if err != nil {
		t.Fatal(err)
	}
	defer archive.Close()
	for _, entry := range archive.File {
		if at, err := entry.DataOffset(); err != nil || at%alignment != 0 || entry.Method != zip.Store {
			t.Errorf("%s begins at %d with method %d: %v", entry.Name, at, entry.Method, err)
		}
	}
}

// saveInTorch trains with torch. It saves files that OpenTorch reads, and files that it
// must refuse.
const saveInTorch = `
import copy, sys, torch
folder = sys.argv[1]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.LayerNorm(30), torch.nn.Linear(30, 7))
named = list(model.named_parameters())
groups = [{"params": [p for n, p in named if p.dim() > 1]}, {"params": [p for n, p in named if p.dim() < 2], "weight_decay": 0.0}]
names = [n for g in groups for p in g["params"] for n, q in named if p is q]
optimizer = torch.optim.AdamW(groups, lr=1e-2)
for _ in range(3):
    model(torch.randn(5, 40)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
saved = {**optimizer.state_dict(), "names": names, "master": model.state_dict()}
torch.save(saved, folder + "/good.pt")
for i, n in enumerate(names):
    for t in (saved["master"][n], saved["state"][i]["exp_avg"], saved["state"][i]["exp_avg_sq"]):
        print(n, list(t.shape), t.numpy().tobytes().hex())

def bad(name, change):
    other = copy.deepcopy(saved)
    change(other)
    torch.save(other, folder + "/" + name + ".pt")
def turn(d): d["master"][names[0]] = d["master"][names[0]].t()
def bf16(d): d["state"][1]["exp_avg"] = d["state"][1]["exp_avg"].bfloat16()
def half(d): d["state"][1]["exp_avg"] = d["state"][1]["exp_avg"].half()
def shape(d): d["state"][0]["exp_avg_sq"] = torch.zeros(3)
def step(d): d["state"][2]["step"] = torch.tensor(9.0)
def absent(d): del d["state"][1]
def unnamed(d): del d["names"]
def lacks(d): del d["master"][names[1]]
def other(d): del d["state"][0]["exp_avg"]; d["state"][0]["exp"] = 1
def grouped(d): d["param_groups"][1]["params"].pop()
def few(d): d["names"].pop()
def stepless(d): del d["state"][0]["step"]
def amsgrad(d): d["state"][0]["max_exp_avg_sq"] = torch.zeros(30, 40)
def empty(d):
    none = torch.optim.AdamW([torch.nn.Parameter(torch.empty(s)) for s in ((4, 0), (0, 4))])
    for p in none.param_groups[0]["params"]: p.grad = torch.empty_like(p)
    none.step()
    for i, (p, s) in enumerate(none.state.items(), len(d["names"])):
        d["names"].append(f"empty{i}"); d["master"][f"empty{i}"] = p.data
        d["param_groups"][1]["params"].append(i); d["state"][i] = s
class Thing: pass
def thing(d): d["thing"] = Thing()
for change in (turn, bf16, half, shape, step, absent, unnamed, lacks, other, grouped, few, stepless, amsgrad, thing, empty):
    bad(change.__name__, change)

for kind, arguments in ((torch.optim.SGD, {"dampening": 0.5}), (torch.optim.RMSprop, {})):
    p = torch.nn.Parameter(torch.ones(5))
    optimizer = kind([p], lr=0.1, momentum=0.9, **arguments)
    p.grad = torch.ones(5)
    optimizer.step()
    torch.save({**optimizer.state_dict(), "names": ["p"], "master": {"p": p.data}}, f"{folder}/{kind.__name__}.pt")
`

func TestFromTorch(t *testing.T) {
	folder := t.TempDir()
	lines := strings.Split(strings.TrimSpace(python(t, saveInTorch, folder)), "\n")
	t.Run("good", func(t *testing.T) {
		c, err := OpenTorch(t.Context(), filepath.Join(folder, "good.pt"), BesideTorch{}, nil)
		if err != nil {
			t.Fatal(err)
		}
		split := kernel.Split
		path, err := c.Convert(t.Context(), t.TempDir(), checkpoint.Conversion{State: &split, Ranks: 2}, nil)
		if err != nil {
			t.Fatal(err)
		}
		converted, err := checkpoint.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		job := newJob(t, shardtest.SplitFormat, 300, pieces(converted))
		load(t, path, job)
		if converted.Step() != 3 || job[0].Pieces[0].Group != 0 || job[1].Pieces[len(job[1].Pieces)-1].Group != 1 {
			t.Errorf("step %d, %+v", converted.Step(), job[0].Pieces)
		}
		want := linesOf(job)
		if len(lines) != len(want) {
			t.Errorf("%d tensors, want %d", len(want), len(lines))
		}
		for _, line := range lines {
			if !want[line] {
				t.Errorf("%.60s... is not what torch has saved", line)
			}
		}
	})
	for name, says := range map[string][]string{
		"turn":     {`"0.weight": master: a tensor of shape [40 30] with strides [1 40]`, "contiguous"},
		"half":     {`"2.weight": exp_avg: a tensor with a HalfStorage, expected fp32`},
		"shape":    {`"0.weight": exp_avg_sq: a tensor of shape [3]`},
		"unnamed":  {`no list "names"`, "docs/checkpoints.md"},
		"lacks":    {`"2.weight": it has no tensor in "master"`},
		"other":    {`"0.weight": its "state" has no moments`},
		"grouped":  {"in no parameter group"},
		"few":      {`it has 5 "names", but 6 parameters in "param_groups"`},
		"stepless": {`"0.weight": it has no step, which Adam needs`},
		"amsgrad":  {`"0.weight": its "state" has max_exp_avg_sq`, "this is another optimizer"},
		"RMSprop":  {"its momentum_buffer is not SGD's: its parameter groups have no option dampening"},
		"thing":    {"a __main__.Thing, expected nothing but tensors"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := OpenTorch(t.Context(), filepath.Join(folder, name+".pt"), BesideTorch{}, nil)
			shardtest.MustSay(t, err, append(says, name+".pt")...)
		})
	}
	for name, want := range map[string][]int64{"step": {3, 3, 9, 3}, "absent": {3, 0, 3, 3}} {
		t.Run(name, func(t *testing.T) {
			c, err := OpenTorch(t.Context(), filepath.Join(folder, name+".pt"), BesideTorch{}, nil)
			if err != nil {
				t.Fatal(err)
			}
			if err := c.Verify(t.Context(), nil); err != nil {
				t.Error(err)
			}
			for i, parameter := range c.Names()[:4] {
				if got := c.StepOf(parameter); got != want[i] || c.Step() != slices.Max(want) {
					t.Errorf("%s has had %d of %d steps, want %d of %d", parameter, got, c.Step(), want[i],
						slices.Max(want))
				}
			}
		})
	}
	t.Run("bf16", func(t *testing.T) { // moments that are widened
		if _, err := OpenTorch(t.Context(), filepath.Join(folder, "bf16.pt"), BesideTorch{}, nil); err != nil {
			t.Error(err)
		}
	})
	t.Run("empty", func(t *testing.T) { // parameters without any element, which torch steps, too
		c, err := OpenTorch(t.Context(), filepath.Join(folder, "empty.pt"), BesideTorch{}, nil)
		if err != nil || len(c.Names()) != 6 {
			t.Errorf("%+v, %v, want the 6 parameters that have elements", c, err)
		}
	})
	t.Run("SGD", func(t *testing.T) { // whose next step is dampened, as it is not the first
		c, err := OpenTorch(t.Context(), filepath.Join(folder, "SGD.pt"), BesideTorch{}, nil)
		if err != nil || c.Algorithm() != kernel.SGD || c.Step() != 1 {
			t.Errorf("%+v, %v, want SGD after its first step", c, err)
		}
	})
	t.Run("damaged", func(t *testing.T) { refuseDamage(t, filepath.Join(folder, "good.pt")) })
}

// refuseDamage changes a byte of a tensor, and cuts the file short.
func refuseDamage(t *testing.T, path string) {
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	archive, err := zip.OpenReader(path)
	if err != nil {
		t.Fatal(err)
	}
	defer archive.Close()
	for _, f := range archive.File {
		if at, err := f.DataOffset(); err == nil && strings.Contains(f.Name, "/data/") && f.UncompressedSize64 > 100 {
			shardtest.Poke(t, path, int(at)+50, text[at+50]^1)
			_, err = OpenTorch(t.Context(), path, BesideTorch{}, nil)
			shardtest.MustSay(t, err, path, f.Name)
			break
		}
	}
	if err := os.WriteFile(path, text[:len(text)/2], 0o644); err != nil {
		t.Fatal(err)
	}
	_, err = OpenTorch(t.Context(), path, BesideTorch{}, nil)
	shardtest.MustSay(t, err, path, "no optimizer state")
	_, err = OpenTorch(t.Context(), path+"x", BesideTorch{}, nil)
	shardtest.MustSay(t, err, path+"x", "no such file")
}
