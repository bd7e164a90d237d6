//go:build linux

package foreign

import (
	"path/filepath"
	"runtime"
	"sync/atomic"
	"testing"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/state/checkpoint"
	"plimsoll/internal/state/checkpoint/shardtest"
	"plimsoll/internal/state/optim/kernel"
)

// TestMemoryStaysSmall: every operation on a checkpoint of 96 MiB takes a few buffers of a
// chunk each.
func TestMemoryStaysSmall(t *testing.T) {
	model := []shardtest.Tensor{{"mlp.weight", []int64{8 << 10, 1 << 10}, 0}}
	job := newJob(t, shardtest.SplitFormat, 0, shardtest.CutModel(model, shardtest.Alike(kernel.MomentsFP32)))
	train(t, job, 1, 0)
	directory := t.TempDir()
	var c *checkpoint.Checkpoint
	bf16, folder := kernel.MomentsBF16, filepath.Join(t.TempDir(), "dcp")
	exported := filepath.Join(t.TempDir(), "optimizer.pt")
	for _, test := range []struct {
		name string
		do   func() error
	}{
		{"save", func() error {
			saving, err := checkpoint.Save(directory, job[0], nil)
			if err == nil {
				err = saving.Wait()
			}
			if err == nil {
				_, err = checkpoint.Commit(directory, 0, "")
			}
			return err
		}},
		{"open", func() (err error) {
			c, err = checkpoint.Open(directory)
			return err
		}},
		{"verify", func() error {
			var told atomic.Int64
			err := c.Verify(t.Context(), func(bytes int64) { told.Add(bytes) })
			if told.Load() != c.Bytes() || c.Bytes() != 12<<23 {
				t.Errorf("progress was told of %d bytes of %d", told.Load(), c.Bytes())
			}
			return err
		}},
		{"load", func() error {
			_, _, err := c.Load(t.Context(), job[0])
			return err
		}},
		{"convert", func() error {
			_, err := c.Convert(t.Context(), t.TempDir(), checkpoint.Conversion{Moments: &bf16}, nil)
			return err
		}},
		{"write for others", func() error { return WriteDistributed(t.Context(), c, folder, nil) }},
		{"open that", func() (err error) {
			c, err = OpenDistributed(t.Context(), folder, nil)
			return err
		}},
		{"convert that", func() error {
			_, err := c.Convert(t.Context(), t.TempDir(), checkpoint.Conversion{}, nil)
			return err
		}},
		{"write for DeepSpeed", func() error { return WriteUniversal(t.Context(), c, t.TempDir(), nil) }},
		{"export", func() error { return WriteTorch(t.Context(), c, exported, nil) }},
		{"export like that", func() error { return WriteTorchLike(t.Context(), c, exported+"2", exported, "", nil) }},
	} {
		staysSmall(t, test.name, 6*ledger.MiB, test.do)
	}
}

// staysSmall fails where an operation takes more than some buffers.
func staysSmall(t *testing.T, name string, most ledger.Bytes, do func() error) {
	t.Helper()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	if err := do(); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	runtime.ReadMemStats(&after)
	// All memory that was ever allocated, freed or not.
	if took := ledger.Bytes(after.TotalAlloc - before.TotalAlloc); took > most {
		t.Errorf("%s took %v", name, took)
	} else {
		t.Logf("%s took %v", name, took)
	}
}

// TestMegatronMemoryStaysSmall: a copy of 56 MiB is made and filled in some buffers.
func TestMegatronMemoryStaysSmall(t *testing.T) {
	like := filepath.Join(t.TempDir(), "like")
	python(t, `
import sys, torch, torch.distributed.checkpoint as dcp
path, name = sys.argv[1], "mlp.weight"
state = {f"optimizer.state.{c}.{name}": torch.rand(4 << 10, 1 << 10) for c in ("param", "exp_avg", "exp_avg_sq")}
state[name] = state["optimizer.state.param." + name].bfloat16()
dcp.save(state, checkpoint_id=path, no_dist=True)
open(path + "/metadata.json", "w").write('{"sharded_backend": "torch_dist"}')
torch.save({"optimizer": {"optimizer": {"param_groups": [{"step": 3}]}}}, path + "/common.pt")
`, like)
	c, err := OpenMegatron(t.Context(), like, nil)
	if err != nil {
		t.Fatal(err)
	}
	// A checksum takes a buffer: of each tensor that is read.
	staysSmall(t, "write for Megatron", 16*ledger.MiB, func() error {
		return WriteMegatron(t.Context(), c, t.TempDir(), like, nil)
	})
}

// TestZeroMemoryStaysSmall: a copy of 56 MiB is made and filled in some buffers, though its pickle is written again,
// because the step is a number in it.
func TestZeroMemoryStaysSmall(t *testing.T) {
	folder := t.TempDir()
	python(t, `
import os, sys, torch
def t(): return torch.rand(4 << 20)
for step in (2, 3):
    path = sys.argv[1] + f"/{step}/"
    os.mkdir(path)
    adam = {"state": {0: {"step": step, "exp_avg": t(), "exp_avg_sq": t()}}, "param_groups": [{"params": [0], "lr": 0.1, "step": 0}]}
    state = {"zero_stage": 3, "partition_count": 1, "fp32_flat_groups": [t()], "optimizer_state_dict": adam}
    torch.save({"optimizer_state_dict": state}, path + "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    module = {"mlp.weight": t().view(4 << 10, 1 << 10).half()}
    torch.save({"module": module, "param_shapes": [{"mlp.weight": torch.Size([4 << 10, 1 << 10])}]}, path + "zero_pp_rank_0_mp_rank_00_model_states.pt")
`, folder)
	c, err := OpenDeepSpeed(t.Context(), filepath.Join(folder, "3"), nil)
	if err != nil {
		t.Fatal(err)
	}
	out := t.TempDir()
	staysSmall(t, "write for ZeRO", 16*ledger.MiB, func() error {
		return WriteDeepSpeed(t.Context(), c, out, filepath.Join(folder, "2"), nil)
	})
	got := python(t, `
import sys, torch
def read(path):
    prefix = path + "/zero_pp_rank_0_mp_rank_00_"
    return torch.load(prefix + "optim_states.pt")["optimizer_state_dict"], torch.load(prefix + "model_states.pt")["module"]["mlp.weight"]
(want, _), (got, half) = map(read, sys.argv[1:])
assert torch.equal(got["fp32_flat_groups"][0], want["fp32_flat_groups"][0])
for key, t in want["optimizer_state_dict"]["state"][0].items():
    own = got["optimizer_state_dict"]["state"][0][key]
    assert own == t if key == "step" else torch.equal(own, t), key
assert torch.equal(half.flatten(), want["fp32_flat_groups"][0].half())
print("as it shall be")
`, filepath.Join(folder, "3"), filepath.Join(out, "2"))
	if got != "as it shall be\n" {
		t.Error(got)
	}
}
