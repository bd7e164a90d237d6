package job

import (
	"fmt"
	"strings"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/autograd"
)

// Muon updates matrices of hidden layers by their orthogonalized momentum, and AdamW updates the rest: embeddings, the
// output head, and what is no matrix.
const (
	// muon is torch.optim.Muon. A stack of matrices, as fused experts are, counts as its matrices
	// (plimsoll.torch.muon_groups).
	muon = "muon"
	// moonlight is the Muon of Moonlight's example, as LLaMA-Factory has it, and axolotl without FSDP. AdamW updates
	// stacks of matrices.
	moonlight = "muon-moonlight"
	// dion is the Muon of microsoft/dion, as axolotl has it with FSDP2 (DistMuon).
	dion = "muon-dion"
)

// newtonSchulz is what the step over a matrix holds at its peak.
type newtonSchulz struct {
	shard   ledger.Bytes
	ranks   int64        // that share a matrix
	matrix  ledger.Bytes // the full one, in bf16
	gram    ledger.Bytes // the matrix times its transpose, in bf16
	isUpper bool         // there are no more rows than columns
}

// muonKind returns a Muon with the names of its states.
func muonKind(name, why, matrix string, others ...string) optimizerKind {
	return optimizerKind{name: name, why: why, lists: 1, loopTensors: 2, passes: (*Optimizer).muonPasses,
		states: func(p *autograd.Parameter) []State {
			if p.Hidden {
				return sameShape(matrix)(p)
			}
			return sameShape(others...)(p)
		},
	}
}

// muons are the rows of the Muons.
var muons = func() []optimizerKind {
	ofAxolotl := []optimizerKind{
		muonKind(moonlight, "Muon orthogonalizes a matrix at a time in bf16, and under FSDP2 gathers it before "+
			"(zeropower_via_newtonschulz5); its AdamW has all other parameters, one after the other",
			"momentum_buffer", "moment1", "moment2"),
		muonKind(dion, "DistMuon exchanges shards, so that a rank has one full matrix of so many as there are ranks, "+
			"for three such groups at a time (dist_muon.py); its AdamW has all other parameters",
			"momentum", "momentum", "variance"),
	}
	for i := range ofAxolotl {
		ofAxolotl[i].uncounted = true
	}
	of := muonKind(muon, "torch.optim.Muon orthogonalizes a matrix at a time in bf16 (_zeropower_via_newtonschulz in "+
		"torch/optim/_muon.py); torch.optim.AdamW has all other parameters, and a list of its own",
		"momentum_buffer", "exp_avg", "exp_avg_sq")
	of.variants = ofTorch // of AdamW, which has the parameters that Muon does not
	return append(ofAxolotl, of)
}()

// IsMuon reports whether the optimizer is one of the Muons.
func (o *Optimizer) IsMuon() bool { return strings.HasPrefix(o.Name, muon) }

// orthogonalizes reports whether a parameter is updated by Muon, not by AdamW.
func (o *Optimizer) orthogonalizes(p *autograd.Parameter) bool {
	return o.IsMuon() && p.Hidden && !(o.Name == moonlight && p.Matrices > 0)
}

// muonPasses returns the temporaries of Muon's step over the hidden matrices, and of AdamW's step over the others.
func (o *Optimizer) muonPasses(parameters []*autograd.Parameter) [][]ledger.Bytes {
	var others []*autograd.Parameter
	var largest []ledger.Bytes
	most := ledger.Bytes(0)
	for _, p := range parameters {
		if !o.orthogonalizes(p) {
			others = append(others, p)
			continue
		}
		list := o.orthogonalized(p)
		sum := ledger.Bytes(0)
		for _, bytes := range list {
			sum += bytes
		}
		if sum > most {
			largest, most = list, sum
		}
	}
	adamW := *o
	if o.Name == moonlight {
		adamW.Variant = Loop
	}
	return [][]ledger.Bytes{largest, adamW.temporaries(others)}
}

// orthogonalized returns the temporaries of a matrix's update, whose shard a rank has under FSDP2.
func (o *Optimizer) orthogonalized(p *autograd.Parameter) []ledger.Bytes {
	stack, ranks := max(1, p.Matrices), max(1, o.Ranks)
	if p.Matrices > 0 { // FSDP2 shards the stack, not its matrices
		ranks = 1
	}
	rows, columns := p.Rows*ranks, p.Elements/(stack*p.Rows)
	n := newtonSchulz{shard: ledger.Bytes(p.Elements * p.DType.Size()), ranks: ranks,
		matrix: ledger.Bytes(2 * p.Elements * ranks), isUpper: rows <= columns,
		gram: ledger.Bytes(2 * stack * min(rows, columns) * min(rows, columns))}
	switch {
	case o.Name == moonlight:
		return n.moonlight()
	case o.Name == dion && o.Ranks > 0:
		return n.dion()
	case ranks > 1:
		return n.divided()
	}
	// The momentum ahead of the gradient (Nesterov) in their type, and in bf16 the matrix before and behind an
	// iteration, its Gram matrix, and the polynomial of that.
	return []ledger.Bytes{n.shard, n.matrix, n.gram, n.gram, n.matrix}
}

// divided is torch.optim.Muon over tensors that FSDP2 divides by rows. DTensor gathers the matrix for products where it
// has no more rows than columns. Otherwise it adds up the ranks' Gram matrices. What Newton-Schulz had before the last
// product is still held: torch 2.15's dispatch was watched on 2, 4 and 8 ranks.
func (n newtonSchulz) divided() []ledger.Bytes {
	part := n.matrix / ledger.Bytes(n.ranks)
	if n.isUpper {
		return []ledger.Bytes{n.shard, part, part, part, n.gram, n.gram, n.matrix, n.matrix}
	}
	list := []ledger.Bytes{n.shard, part, n.gram, n.gram, n.gram}
	return append(list, max(part, n.gram))
}

// moonlight is Muon operation by operation: the momentum ahead of the gradient, all of it gathered, and in bf16 four
// times the matrix and twice its Gram matrix.
func (n newtonSchulz) moonlight() []ledger.Bytes {
	list := []ledger.Bytes{n.shard, n.matrix, n.matrix, n.matrix, n.matrix, n.gram, n.gram}
	if n.ranks > 1 {
		list = append(list, n.shard*ledger.Bytes(n.ranks))
	}
	return list
}

// dion is Muon over so many matrices as there are ranks, each rank with one of them. One group is orthogonalized: its
// shards, those that came, the matrix, and two more of an iteration. The group behind it has sent its shards, and the
// group before waits for the shards of its update.
func (n newtonSchulz) dion() []ledger.Bytes {
	if n.ranks == 1 { // a stack, or one rank
		return []ledger.Bytes{n.matrix, n.matrix, n.matrix, n.gram, n.gram, n.gram}
	}
	list := []ledger.Bytes{n.gram, n.gram, n.gram}
	count := 9
	if !n.isUpper { // the transposed update is copied before it is divided
		count++
	}
	for range count {
		list = append(list, n.matrix)
	}
	return list
}

// refuseMuon refuses jobs in which a rank has parts of matrices only, and the Muons that do not gather them.
func (j *Job) refuseMuon() error {
	if !j.Optimizer.IsMuon() {
		return nil
	}
	const why = ", and a part that is orthogonalized alone trains another model"
	return refuse(
		contradiction{j.FSDP != nil && j.FSDP.Version == 1, "FSDP1 divides every matrix among its ranks" + why,
			"use FSDP2, or DistributedDataParallel, which leaves every matrix whole"},
		contradiction{j.FSDP != nil && j.FSDP.OffloadParameters, "Muon under FSDP2 gathers matrices on the GPU, but " +
			"their shards are on the host, which is not planned yet", "leave the parameters on the GPU"},
		contradiction{j.FSDP != nil && j.Offload != nil, "plimsoll.torch.StateOffload has no Muon for shards of FSDP2",
			"leave --offload states out, or use DistributedDataParallel"},
		contradiction{j.FSDP == nil && j.Optimizer.Name == dion && j.World > 1, "axolotl's distributed Muon without " +
			"FSDP2 is not planned yet", "use FSDP2"},
		j.unevenMatrices(),
		contradiction{j.DeepSpeed != nil, "DeepSpeed has a Muon of its own, which is not planned yet",
			"use another optimizer"},
		contradiction{j.Parallel.Tensor > 1, "tensor parallelism divides matrices among ranks" + why,
			"leave --tensor-parallel out"},
	)
}

// unevenMatrices finds a matrix whose rows axolotl's DistMuon cannot divide.
func (j *Job) unevenMatrices() contradiction {
	if j.FSDP == nil || j.Optimizer.Name != dion {
		return contradiction{}
	}
	for _, p := range j.Model.Parameters {
		isHidden := len(p.Shape) == 2 && !p.IsEmbedding() && p.Block >= 0
		if isHidden && p.Shape[0]%j.Parallel.Shard != 0 {
			return contradiction{true, fmt.Sprintf("axolotl's DistMuon asserts that ranks divide the rows of a "+
				"matrix, but %s has %d and there are %d ranks", p.Name, p.Shape[0], j.Parallel.Shard),
				"use another number of GPUs"}
		}
	}
	return contradiction{}
}
