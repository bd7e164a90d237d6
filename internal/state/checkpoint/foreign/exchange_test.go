//go:build linux

package foreign

import (
	"archive/zip"
	"cmp"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"plimsoll/internal/base/torchtest"
	"plimsoll/internal/state/checkpoint"
	"plimsoll/internal/state/checkpoint/shardtest"
	"plimsoll/internal/state/optim/kernel"
)

// ranksOf forks the other ranks of a world.
const ranksOf = `
import os, socket, sys, torch
free = socket.socket(); free.bind(("127.0.0.1", 0)); port = free.getsockname()[1]; free.close()
rank, children = 0, []
while rank == 0 and len(children) < world - 1:
    if child := os.fork():
        children.append(child)
    else:
        rank = len(children) + 1
os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1",
    MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
torch.set_num_threads(1)
torch.manual_seed(0)
def network():
    return torch.nn.Sequential(torch.nn.Linear(40, 31), torch.nn.LayerNorm(31), torch.nn.Linear(31, 7))
def groups(model):
    named = list(model.named_parameters())
    return [{"params": [p for n, p in named if p.dim() > 1], "weight_decay": 0.1}, {"params": [p for n, p in named if p.dim() < 2], "weight_decay": 0.0}]
def show(n, *tensors):
    if rank == 0:
        for t in tensors:
            print("=", n, list(t.shape), t.detach().contiguous().numpy().tobytes().hex(), flush=True)
def end():
    sys.stdout.flush()
    ends = [os.waitpid(child, 0)[1] for child in children if rank == 0]
    os._exit(max(map(os.waitstatus_to_exitcode, ends), default=0))
`

// inDeepSpeed trains and saves, or loads a universal checkpoint, and shows its state.
const inDeepSpeed = ranksOf + `
folder, stage, load, kind = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "load", sys.argv[4]
import deepspeed
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
deepspeed.init_distributed(dist_backend="gloo")
model = network()
zero, offloaded, adam = {"stage": stage}, kind == "DeepSpeedCPUAdam", kind in ("AdamW", "DeepSpeedCPUAdam")
optimizer = getattr(deepspeed.ops.adam if offloaded else torch.optim, kind)(groups(model), lr=1e-2)
if offloaded:
    zero.update(offload_optimizer={"device": "cpu"})
if stage == 3:
    zero.update(sub_group_size=500)
config = {"train_micro_batch_size_per_gpu": 5, "bf16": {"enabled": True}, "zero_optimization": zero, "zero_allow_untested_optimizer": True}
if load:
    os.chdir(os.path.dirname(folder))
    exec(sys.argv[5])
    of_like = len(sys.argv) > 6
    assert engine.global_steps == (1 if of_like else 3), engine.global_steps
    for file in os.listdir(sys.argv[6]) if of_like else []:
        if "model_states" in file: # has the parameters themselves
            own, want = (torch.load(path + "/" + file, weights_only=False)["module"] for path in (folder + "/early", sys.argv[6]))
            assert list(own) == list(want) and all(torch.equal(own[n], want[n]) for n in own), file
    assert {float(s["step"]) for s in engine.optimizer.optimizer.state.values()} == {3.0}
else:
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for count in range(3):
        engine.backward(engine(torch.randn(5, 40).bfloat16()).square().sum())
        engine.step()
        if count == 0:
            engine.save_checkpoint(folder, tag="early")
    engine.save_checkpoint(folder)
def gathered(t):
    parts = [torch.empty_like(t) for _ in range(2)]
    torch.distributed.all_gather(parts, t.detach().clone())
    return torch.cat(parts)
def show_states(prefix):
    if adam and stage == 3:
        for n, p in model.named_parameters():
            show(prefix + n, safe_get_full_fp32_param(p), *(safe_get_full_optimizer_state(p, s) for s in ("exp_avg", "exp_avg_sq")))
    elif adam:
        own = engine.optimizer
        for master, group, whole in zip(own.single_partition_of_fp32_groups, own.optimizer.param_groups, own.round_robin_bit16_groups):
            state = own.optimizer.state[group["params"][0]]
            flat = [gathered(t.detach()) for t in (master, state["exp_avg"], state["exp_avg_sq"])]
            for p in whole:
                show(prefix + engine.param_names[p], *(f[:p.numel()].view(p.shape) for f in flat))
                flat = [f[p.numel():] for f in flat]
show_states("")
for then in "then ", "then again ":
    torch.manual_seed(rank)
    engine.backward(engine(torch.randn(5, 40).bfloat16()).square().sum())
    engine.step()
    show_states(then)
end()
`

// withDeepSpeed is the interpreter of programs that import DeepSpeed.
func withDeepSpeed(t *testing.T) *torchtest.Forks {
	t.Helper()
	t.Setenv("DS_ACCELERATOR", "cpu")
	t.Setenv("DEEPSPEED_LOG_LEVEL", "error")
	// DeepSpeed's engine and the first optimizer of a process import the others.
	return torchtest.Imported(t, "torch", "deepspeed", "torch._dynamo", "torch._inductor.compile_fx",
		"deepspeed.module_inject")
}

// twoOf runs a program with two ranks, and returns what it shows.
func twoOf(t *testing.T, interpreter *torchtest.Forks, program string, arguments ...string) []string {
	t.Helper()
	return shownBy(t, 2, interpreter, program, arguments...)
}

// shownBy is twoOf for any number of ranks.
func shownBy(t *testing.T, ranks int, interpreter *torchtest.Forks, program string, arguments ...string) []string {
	t.Helper()
	out := outputOf(t, interpreter, fmt.Sprintf("world = %d\n%s", ranks, program), arguments...)
	var lines []string
	for line := range strings.SplitSeq(out, "\n") {
		if line, ok := strings.CutPrefix(line, "= "); ok {
			lines = append(lines, line)
		}
	}
	slices.Sort(lines)
	return lines
}

// converted converts a checkpoint, loads it, and compares it with what its program has
// shown.
func converted(t *testing.T, c *checkpoint.Checkpoint, shown []string) string {
	t.Helper()
	split := kernel.Split
	path, err := c.Convert(t.Context(), t.TempDir(), checkpoint.Conversion{State: &split, Ranks: 3}, nil)
	if err != nil {
		t.Fatal(err)
	}
	own, err := checkpoint.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	job := newJob(t, shardtest.SplitFormat, 300, pieces(own))
	load(t, path, job)
	got := linesOf(job)
	if own.Step() != 3 || len(shown) != 18 || len(got) != len(shown) {
		t.Fatalf("step %d, and %d tensors, want those %d of step 3", own.Step(), len(got), len(shown))
	}
	for _, line := range shown {
		if !got[line] {
			t.Errorf("%.60s... is not what was saved", line)
		}
	}
	return path
}

func TestDeepSpeed(t *testing.T) {
	interpreter := withDeepSpeed(t)
	loads := documented(t, "load_universal")
	for _, test := range []struct{ stage, optimizer, program string }{
		{"1", "AdamW", ""}, // has the files of ZeRO 2
		{"2", "AdamW", loads},
		{"3", "AdamW", loads + documented(t, "engine.optimizer.optimizer")},
		{"3", "DeepSpeedCPUAdam", loads},
	} {
		if testing.Short() && (test.stage != "3" || test.optimizer != "AdamW") {
			continue // examples/deepspeed has the files of ZeRO 2
		}
		t.Run("ZeRO "+test.stage+", "+test.optimizer, func(t *testing.T) {
			if _, err := exec.LookPath("c++"); err != nil && test.optimizer == "DeepSpeedCPUAdam" {
				t.Skip("DeepSpeed builds its optimizer with c++, which is not here")
			}
			folder, universal := t.TempDir(), filepath.Join(t.TempDir(), "universal")
			shown := twoOf(t, interpreter, inDeepSpeed, folder, test.stage, "save", test.optimizer)
			c, err := OpenDeepSpeed(t.Context(), folder, nil)
			if err != nil {
				t.Fatal(err)
			}
			own, err := checkpoint.Open(converted(t, c, ofTheSave(shown)))
			if err != nil {
				t.Fatal(err)
			}
			goesBack(t, own, folder, func(out string) {
				if testing.Short() { // DeepSpeed itself loads the universal checkpoint below
					again, err := OpenDeepSpeed(t.Context(), out, nil)
					if err != nil {
						t.Fatal(err)
					}
					converted(t, again, ofTheSave(shown))
					return
				}
				back := twoOf(t, interpreter, inDeepSpeed, out, test.stage, "load", test.optimizer,
					documented(t, `load_checkpoint("zero")`), filepath.Join(folder, "global_step3"))
				if !slices.Equal(back, shown) {
					t.Errorf("DeepSpeed goes on with %d tensors, not the %d that it has saved", len(back), len(shown))
				}
			})
			if err := WriteUniversal(t.Context(), own, universal, nil); err != nil {
				t.Fatal(err)
			}
			if test.program == "" {
				return
			}
			if back := twoOf(t, interpreter, inDeepSpeed, universal, test.stage, "load", test.optimizer,
				test.program); !slices.Equal(back, shown) {
				t.Errorf("DeepSpeed has loaded, and gone on with, %d tensors, not the %d that it has saved",
					len(back), len(shown))
			}
			if c, err = OpenDeepSpeed(t.Context(), universal, nil); err != nil {
				t.Fatal(err)
			}
			converted(t, c, ofTheSave(shown))
			refuseBroken(t, filepath.Join(folder, "global_step3"))
		})
	}
}

// goesBack writes a checkpoint in the place of an earlier one of the job.
func goesBack(t *testing.T, c *checkpoint.Checkpoint, saved string, resume func(out string)) {
	t.Helper()
	like, out := filepath.Join(saved, "early"), filepath.Join(t.TempDir(), "zero")
	if err := WriteDeepSpeed(t.Context(), c, out, like, nil); err != nil {
		t.Fatal(err)
	}
	if tag := linesIn(t, filepath.Join(out, latestTag)); tag[0] != "early" {
		t.Error(tag)
	}
	resume(out)
	shardtest.MustSay(t, WriteDeepSpeed(t.Context(), c, out, like, nil), "is here already")
}

// ofTheSave leaves out what a program has shown after another step.
func ofTheSave(shown []string) []string {
	later := func(line string) bool { return strings.HasPrefix(line, "then ") }
	return slices.DeleteFunc(slices.Clone(shown), later)
}

// refuseBroken damages copies of a checkpoint of two ranks.
func refuseBroken(t *testing.T, folder string) {
	of := func(rank string) string { return "bf16_zero_pp_rank_" + rank + "_mp_rank_00_optim_states.pt" }
	for name, test := range map[string]struct {
		change func(folder string) error
		says   string
	}{
		"a rank is missing": {func(f string) error { return os.Remove(filepath.Join(f, of("0"))) },
			"the file of rank 0 is missing"},
		"the last rank is missing": {func(f string) error { return os.Remove(filepath.Join(f, of("1"))) },
			"divided among 2 ranks, and the files of 1 are here"},
		"tensor parallel": {func(f string) error {
			return os.WriteFile(filepath.Join(f, "mp_rank_01_model_states.pt"), nil, 0o600)
		}, "tensor or pipeline parallel"},
		"a flipped bit": {func(f string) error { return flip(filepath.Join(f, of("1"))) }, "damaged"},
	} {
		changed := t.TempDir()
		if err := os.CopyFS(changed, os.DirFS(folder)); err != nil {
			t.Fatal(err)
		}
		if err := test.change(changed); err != nil {
			t.Fatal(err)
		}
		_, err := OpenDeepSpeed(t.Context(), changed, nil)
		t.Run(name, func(t *testing.T) { shardtest.MustSay(t, err, changed, test.says) })
	}
}

// flip changes a bit of the largest tensor.
func flip(path string) error {
	archive, err := zip.OpenReader(path)
	if err != nil {
		return err
	}
	defer archive.Close()
	data := slices.DeleteFunc(archive.File, func(f *zip.File) bool { return !strings.Contains(f.Name, "/data/") })
	at, err := slices.MaxFunc(data, func(a, b *zip.File) int {
		return cmp.Compare(a.UncompressedSize64, b.UncompressedSize64)
	}).DataOffset()
	if err != nil {
		return err
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	text[at+50] ^= 1
	return os.WriteFile(path, text, 0o600)
}

// inFSDP trains with FSDP2 and saves with torch.distributed.checkpoint.
const inFSDP = ranksOf + `
path, flat, kind = sys.argv[1], sys.argv[2] == "flat", sys.argv[3]
import torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.checkpoint.state_dict import *
from torch.distributed.checkpoint.state_dict import StateDictOptions
dist.init_process_group("gloo")
model = network()
mesh = init_device_mesh("cpu", (world,))
if sys.argv[2] == "tensor parallel":
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    columns, rows = ColwiseParallel(output_layouts=Replicate()), RowwiseParallel(input_layouts=Replicate())
    parallelize_module(model, mesh, {"0": columns, "2": rows})
else:
    fully_shard(model, mesh=mesh)
optimizer = getattr(torch.optim, kind)(groups(model), lr=1e-2, **({"foreach": False} if kind == "AdamW" else {}))
if len(sys.argv) < 6 and os.path.isdir(path):
    for _ in range(3):
        model(torch.randn(5, 40)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    os.chdir(path)
    if flat:
        weights, state = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
        dcp.save({"model": weights, "optim": state, "epoch": 3}, checkpoint_id="fsdp")
    else:
        exec(sys.argv[4])
else:
    os.chdir(os.path.dirname(path))
    exec(sys.argv[4])
    assert {float(s["step"]) for s in optimizer.state.values()} == {3.0}
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]
if kind == "AdamW":
    for n, p in model.named_parameters():
        s = optimizer.state[p]
        show(n, *(x.full_tensor() if hasattr(x, "full_tensor") else x for x in (p, s["exp_avg"], s["exp_avg_sq"])))
end()
`

// TestOtherOptimizers: what is not AdamW's state is refused.
func TestOtherOptimizers(t *testing.T) {
	deepspeed, folder := withDeepSpeed(t), t.TempDir()
	twoOf(t, deepspeed, inDeepSpeed, folder, "2", "save", "Adamax")
	_, err := OpenDeepSpeed(t.Context(), folder, nil)
	shardtest.MustSay(t, err, "parameter group 0", `its "state" has exp_inf`, "this is another optimizer")
	folder = t.TempDir()
	twoOf(t, deepspeed, inFSDP, folder, "flat", "Adamax")
	_, err = OpenDistributed(t.Context(), filepath.Join(folder, "fsdp"), nil)
	shardtest.MustSay(t, err, `exp_inf" is no state of Adam, Lion, Adagrad or SGD`)
}

// documented returns the Python program in docs/checkpoints.md that has a text.
func documented(t *testing.T, has string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("../../../..", "docs", "checkpoints.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, part := range strings.Split(string(text), "```python\n")[1:] {
		if program, _, _ := strings.Cut(part, "```"); strings.Contains(program, has) {
			return program
		}
	}
	t.Fatalf("docs/checkpoints.md has no program with %s", has)
	return ""
}

// writtenBack writes a checkpoint for torch.distributed.checkpoint. FSDP2 loads it with any
// number of ranks, and we read it, too.
func writtenBack(t *testing.T, c *checkpoint.Checkpoint, interpreter *torchtest.Forks, form string, shown []string) {
	t.Helper()
	ranksOf := map[string][]int{"nested": {1, 4}, "flat": {2}}
	if testing.Short() {
		ranksOf = map[string][]int{"nested": {1}}
	}
	for _, ranks := range ranksOf[form] {
		path := filepath.Join(t.TempDir(), "fsdp")
		if err := writeDistributed(t.Context(), c, path, int64(100*ranks), nil); err != nil {
			t.Fatal(err)
		}
		back := shownBy(t, ranks, interpreter, inFSDP, path, form, "AdamW", documented(t, "checkpoint.load"), "load")
		if !slices.Equal(back, shown) {
			t.Errorf("FSDP2 on %d ranks has loaded %d tensors, which are not the %d that it has saved", ranks,
				len(back), len(shown))
		}
		read, err := OpenDistributed(t.Context(), path, nil)
		if err != nil {
			t.Fatal(err)
		}
		converted(t, read, shown)
		if err := WriteDistributed(t.Context(), c, path, nil); err == nil {
			t.Error("a checkpoint has been replaced")
		}
	}
}

func TestDistributedCheckpoint(t *testing.T) {
	interpreter := withTorch(t)
	for _, form := range []string{"nested", "flat"} {
		t.Run(form, func(t *testing.T) {
			folder := t.TempDir()
			shown := twoOf(t, interpreter, inFSDP, folder, form, "AdamW", documented(t, "get_state_dict"))
			folder = filepath.Join(folder, "fsdp")
			c, err := OpenDistributed(t.Context(), folder, nil)
			if err != nil {
				t.Fatal(err)
			}
			own, err := checkpoint.Open(converted(t, c, shown))
			if err != nil {
				t.Fatal(err)
			}
			exported := filepath.Join(t.TempDir(), "optimizer.pt")
			if err := WriteTorch(t.Context(), own, exported, nil); err != nil {
				t.Fatal(err)
			}
			if form == "nested" || !testing.Short() {
				program := documented(t, "set_optimizer_state_dict")
				if back := twoOf(t, interpreter, inFSDP, exported, form, "AdamW", program); !slices.Equal(back, shown) {
					t.Errorf("FSDP2 has loaded %d tensors, which are not the %d that it has saved", len(back),
						len(shown))
				}
			}
			writtenBack(t, own, interpreter, form, shown)
			if err := os.Truncate(filepath.Join(folder, "__1_0.distcp"), 10000); err != nil {
				t.Fatal(err)
			}
			_, err = OpenDistributed(t.Context(), folder, nil)
			shardtest.MustSay(t, err, "__1_0.distcp", "damaged: the file has 10000 bytes")
			if err := os.Remove(filepath.Join(folder, "__1_0.distcp")); err != nil {
				t.Fatal(err)
			}
			_, err = OpenDistributed(t.Context(), folder, nil)
			shardtest.MustSay(t, err, "__1_0.distcp", "the checkpoint is not complete")
		})
	}
}

// TestTensorParallel reads chunks of columns.
func TestTensorParallel(t *testing.T) {
	interpreter, folder := withTorch(t), t.TempDir()
	program := documented(t, "get_state_dict")
	shown := twoOf(t, interpreter, inFSDP, folder, "tensor parallel", "AdamW", program)
	c, err := OpenDistributed(t.Context(), filepath.Join(folder, "fsdp"), nil)
	if err != nil {
		t.Fatal(err)
	}
	converted(t, c, shown)
}

// TestDistributedIsCompleteOrNotThere: while a checkpoint is written, there is no folder of its name and no metadata. A
// writer that is stopped leaves nothing.
func TestDistributedIsCompleteOrNotThere(t *testing.T) {
	c, err := OpenDistributed(t.Context(), filepath.Join("../../../..", "examples", "fsdp"), nil)
	if err != nil {
		t.Fatal(err)
	}
	for stop := range 5 {
		folder := t.TempDir()
		ctx, cancel := context.WithCancel(t.Context())
		calls := 0
		err := WriteDistributed(ctx, c, filepath.Join(folder, "new"), func(int64) {
			if calls++; calls > 3*stop {
				cancel()
			}
			entries, err := os.ReadDir(folder)
			if err != nil || len(entries) != 1 || !strings.HasPrefix(entries[0].Name(), checkpoint.SavingPrefix) {
				t.Errorf("%v, %v", entries, err)
			} else if checkpoint.Exists(filepath.Join(folder, entries[0].Name(), metadataName)) {
				t.Error("there are metadata")
			}
		})
		cancel()
		if entries, _ := os.ReadDir(folder); err == nil || len(entries) != 0 {
			t.Errorf("%v, and %v are left", err, entries)
		}
	}
}
