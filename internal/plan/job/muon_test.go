package job

import (
	"strings"
	"testing"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/autograd"
)

// TestOrthogonalized compares the temporaries of a matrix with what a dispatch mode saw torch.optim.Muon allocate for
// it (torch 2.15). The mode also counts the momentum and the parameters, which change in place.
func TestOrthogonalized(t *testing.T) {
	for _, test := range []struct {
		rows, columns int64
		of            dtype.Type
		want          ledger.Bytes
	}{
		{2048, 8192, dtype.BF16, 218103808 - 6*2048*8192}, {8192, 2048, dtype.BF16, 218103808 - 6*2048*8192},
		{2048, 2048, dtype.BF16, 67108864 - 6*2048*2048}, {1024, 4096, dtype.F32, 88080384 - 12*1024*4096},
	} {
		p := &autograd.Parameter{Elements: test.rows * test.columns, Rows: test.rows, DType: test.of, Hidden: true}
		embedding := &autograd.Parameter{Elements: 10, Rows: 5, DType: test.of}
		o := NewOptimizer(muon, Foreach)
		sum := ledger.Bytes(0)
		passes := o.Passes([]*autograd.Parameter{p, p, embedding})
		for _, bytes := range passes[0] {
			sum += bytes
		}
		if sum != test.want || len(passes) != 2 || len(passes[1]) != 1 {
			t.Errorf("%d x %d in %v: %v and %v, want %v", test.rows, test.columns, test.of, sum.Exact(), passes[1],
				test.want.Exact())
		}
		if states := o.States(p); len(states) != 1 || states[0].Bytes != p.Elements*test.of.Size() {
			t.Errorf("a matrix has the states %v", states)
		}
		if states := o.States(embedding); len(states) != 2 {
			t.Errorf("an embedding has the states %v", states)
		}
	}
}

// TestOrthogonalizedUnderFSDP2 compares the temporaries of a matrix with what a dispatch mode saw on rank 0, over gloo
// (torch 2.15): torch.optim.Muon and LLaMA-Factory's Muon of trainer v1, without the momentum. Where DTensor chooses
// by size what it gathers, the plan has the larger.
func TestOrthogonalizedUnderFSDP2(t *testing.T) {
	for _, test := range []struct {
		optimizer            string
		rows, columns, ranks int64
		measured             []float64 // in bytes an element of the matrix
		most                 float64   // of the plan
	}{
		{muon, 768, 1024, 4, []float64{.5, .5, .5, 1, 1.5, 1.5, 2, 2}, 1},
		{muon, 1024, 1024, 4, []float64{.5, .5, .5, 1, 2, 2, 2, 2}, 1},
		{muon, 1024, 1024, 8, []float64{.25, .25, .25, .5, 2, 2, 2, 2}, 1},
		{muon, 256, 1024, 8, []float64{.0625, .0625, .25, .25, .5, 2, 2}, 1.25},
		{muon, 1024, 256, 2, []float64{.5, .5, .5, 1, 1, 2}, 1},
		{muon, 1024, 256, 4, []float64{.5, .5, .5, .5, .5, 1}, 1},
		{muon, 1024, 256, 8, []float64{.25, .5, .5, .5, .5, .5}, 1},
		{muon, 1024, 512, 4, []float64{.5, 1, 1, 1, 1, 1}, 1},
		{moonlight, 1024, 1024, 4, []float64{1, 2, 2, 2, 2, 2, 2, 4}, 1},
		{moonlight, 256, 1024, 2, []float64{.5, .5, 2, 2, 2, 2, 2, 4}, 1},
		{moonlight, 1024, 256, 4, []float64{.5, .5, 1, 2, 2, 2, 2, 4}, 1},
	} {
		o := NewOptimizer(test.optimizer, Foreach)
		o.Ranks = test.ranks
		p := &autograd.Parameter{Elements: test.rows * test.columns / test.ranks, Rows: test.rows / test.ranks,
			DType: dtype.F32, Hidden: true}
		measured, planned := 0., ledger.Bytes(0)
		for _, bytes := range test.measured {
			measured += bytes * float64(test.rows*test.columns)
		}
		for _, bytes := range o.Passes([]*autograd.Parameter{p})[0] {
			planned += bytes
		}
		if float64(planned) < measured || float64(planned) > test.most*measured {
			t.Errorf("%s, %d x %d on %d ranks: planned %v, measured %v", test.optimizer, test.rows, test.columns,
				test.ranks, planned.Exact(), measured)
		}
	}
}

// TestMuonOfAxolotl takes axolotl's distributed Muon with FSDP2, where ranks must divide the rows of every matrix, and
// Moonlight's without.
func TestMuonOfAxolotl(t *testing.T) {
	const text = "base_model: llama-3-8b\noptimizer: muon\nattn_implementation: flash_attention_2\nsequence_len: 512\n"
	const sharded = text + "fsdp_config:\n  fsdp_version: 2\n  transformer_layer_cls_to_wrap: LlamaDecoderLayer\n"
	for _, c := range []struct {
		text       string
		gpus       int
		want, says string
	}{
		{sharded, 4, dion, ""}, {text, 4, moonlight, ""}, {sharded, 3, "", "divide the rows"},
		{sharded + "  offload_params: true\n", 4, "", "on the host"},
	} {
		q := Request{Configs: []string{filestest.InNewFolder(t)("train.yaml", c.text)}, GPUs: c.gpus, GPU: "H100-80GB"}
		j, err := q.Resolve()
		switch {
		case c.says != "":
			if err == nil || !strings.Contains(err.Error(), c.says) {
				t.Errorf("%d GPUs: %v, expected %q", c.gpus, err, c.says)
			}
		case err != nil:
			t.Error(err)
		case j.Optimizer.Name != c.want || (j.Optimizer.Ranks > 0) != (c.want == dion):
			t.Errorf("%s on %d ranks, expected %s", j.Optimizer.Name, j.Optimizer.Ranks, c.want)
		}
	}
}
