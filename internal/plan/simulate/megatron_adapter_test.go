package simulate

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/gpu"
	"plimsoll/internal/input/megatron"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/plan/allocator"
	"plimsoll/internal/plan/job"
)

// coreCase is a line of testdata/core-adapters: what scripts/measure/core_adapter.py has measured.
type coreCase struct {
	Program   recipe.CoreTuner
	Tensor    int64
	Sequence  bool
	Recompute bool
	Experts   int64
	Dropout   float64
	Targets   []string
	Tuned     bool
	Saved     int64
	Trained   map[string]int64
}

// job returns the job of a case.
func (c *coreCase) job(t *testing.T) *job.Job {
	t.Helper()
	arguments := fmt.Sprintf("--num-layers 2 --hidden-size 64 --num-attention-heads 4 --group-query-attention "+
		"--num-query-groups 2 --ffn-hidden-size 128 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 2 "+
		"--vocab-size 512 --make-vocab-size-divisible-by 1 --bf16 --hidden-dropout 0 --attention-dropout 0 --swiglu "+
		"--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights "+
		"--position-embedding-type rope --transformer-impl local --no-bias-swiglu-fusion "+
		"--tensor-model-parallel-size %d --expert-tensor-parallel-size 1", c.Tensor)
	if c.Sequence {
		arguments += " --sequence-parallel"
	}
	if c.Recompute {
		arguments += " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
	}
	if c.Experts > 0 {
		arguments += fmt.Sprintf(" --num-experts %d --moe-router-topk 2 --moe-ffn-hidden-size 64 "+
			"--moe-token-dispatcher-type alltoall", c.Experts)
	}
	m, err := recipe.ReadMegatron(arguments, nil)
	if err != nil {
		t.Fatal(err)
	}
	if c.Tuned {
		a := &recipe.CoreAdapter{Program: c.Program, Rank: 8, Dropout: c.Dropout, ByExpert: true}
		names := c.Targets
		if names == nil {
			names = strings.Fields("linear_qkv linear_proj linear_fc1 linear_fc2")
		}
		if err := a.TargetNames(names); err != nil {
			t.Fatal(err)
		}
		m.Adapter = a
	}
	device, err := gpu.Find("A100-80GB")
	if err != nil {
		t.Fatal(err)
	}
	decided, err := megatron.Decide(m, megatron.Request{World: c.Tensor, GPU: device})
	if err != nil {
		t.Fatal(err)
	}
	return job.OfMegatron(decided)
}

// saved returns what a pass has saved behind its forward pass, once workspaces and buffers exist.
func (c *coreCase) saved(t *testing.T) ledger.Bytes {
	t.Helper()
	j := c.job(t)
	host := newTrace(&heap{Glibc: allocator.NewGlibc()})
	s := &megatronRank{Job: j.Megatron, gpu: newTrace(nil), host: host, pinned: newPinnedMemory(j, host)}
	chunk := j.Megatron.Table[0][0]
	s.chunks = []*modelChunk{{Chunk: chunk, parameters: j.Megatron.Parameters(chunk)}}
	var held ledger.Bytes
	for range 2 {
		before := s.gpu.live
		pass := s.newPass(s.chunks[0])
		loss := pass.forward()
		held = s.gpu.live - before
		pass.tape.Backward(loss)
		pass.tape.Drop(loss)
	}
	return held
}

func readCoreCases(t *testing.T) (list []coreCase) {
	t.Helper()
	f, err := os.Open("testdata/core-adapters.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		var c coreCase
		if err := json.Unmarshal(lines.Bytes(), &c); err != nil {
			t.Fatal(err)
		}
		list = append(list, c)
	}
	return list
}

func TestCoreAdapters(t *testing.T) {
	for _, c := range readCoreCases(t) {
		t.Logf("%s tp %d sp %t re %t ex %d drop %v %v %t: measured %d, planned %d, %+d", c.Program, c.Tensor, c.Sequence,
			c.Recompute, c.Experts, c.Dropout, c.Targets, c.Tuned, c.Saved, c.saved(t), int64(c.saved(t))-c.Saved)
	}
}
