package job

import (
	"slices"
	"strings"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/plan/autograd"
)

// lowRank is what GaLore and APOLLO do to the gradients of matrices: the moments are of their projections (galore_torch
// 1.0, apollo_torch 1.0.3).
type lowRank struct {
	*recipe.LowRank
	kind    string          // one of optimizerKinds
	targets map[string]bool // names of the weights
}

// The names of lowRankKinds begin with one of these.
const galore, apollo = "galore-", "apollo-"

// lowRankKinds are the rows of GaLore and APOLLO.
var lowRankKinds = []optimizerKind{
	lowRankKind(galore+"adamw", "galore_adamw", "galore_adamw_layerwise", "galore"),
	lowRankKind(galore+"adamw-8bit", "galore_adamw_8bit", "galore_adamw_8bit_layerwise"),
	lowRankKind(galore+"adafactor", "galore_adafactor", "galore_adafactor_layerwise"),
	lowRankKind(apollo+"adamw", "apollo_adamw", "apollo_adamw_layerwise", "apollo"),
}

func lowRankKind(name string, names ...string) optimizerKind {
	k := optimizerKind{name: name, variant: Loop, choose: (*resolver).projections, full: true, aliases: aliases{},
		passes: func(o *Optimizer, parameters []*autograd.Parameter) [][]ledger.Bytes {
			return [][]ledger.Bytes{o.lowRank.temporaries(parameters)}
		}}
	for _, other := range names {
		k.aliases[other] = alias{}
	}
	return k
}

// projections makes the optimizer of the settings of a file, or of the defaults of transformers' Trainer.
func (r *resolver) projections(o *Optimizer) error {
	l := &lowRank{kind: o.Name, targets: map[string]bool{}}
	switch f, t := r.Inputs.framework, r.training; {
	case f != nil && f.LowRank != nil && r.Optimizer == "":
		l.LowRank = f.LowRank
	case t != nil && t.Optimizer.LowRank != nil && r.Optimizer == "":
		l.LowRank, r.job.StepsInBackward = t.Optimizer.LowRank, t.Optimizer.StepsInBackward
	default:
		l.LowRank = recipe.NewLowRank(strings.HasPrefix(o.Name, apollo))
		r.assume("%s projects all linear modules to rank %d, the Trainer's default: give --training-args with "+
			"optim_args and optim_target_modules for others", o.Name, l.Rank)
	}
	if err := l.choose(r.job); err != nil {
		return err
	}
	o.lowRank, o.States = l, l.states
	if l.decomposes() {
		r.assume("%s decomposes a matrix at a time (torch.linalg.svd): its workspace on a GPU is planned as two "+
			"matrices in fp32, and was not measured", o.Name)
	}
	return nil
}

// choose finds the linear modules whose gradients are projected. GPT-2's are of another class (Conv1D).
func (l *lowRank) choose(j *Job) error {
	network := j.Model.Network
	linear := map[string]bool{network.Head.Projection: true}
	for _, path := range network.Linears() {
		linear[path] = !network.InputFirst
	}
	for _, p := range j.Model.Parameters {
		module, isWeight := strings.CutSuffix(p.Name, ".weight")
		if !isWeight || !linear[module] || len(p.Shape) != 2 || p.TiedTo != "" || p.Frozen || !l.Has(module) {
			continue
		}
		l.targets[p.Name] = true
		rows, columns := p.Shape[0], p.Shape[1]
		if strings.HasPrefix(l.kind, apollo) && (l.Projection == "full" ||
			(l.Random || l.ByChannel) && l.left(rows, columns) != (rows < columns)) {
			return l.Place.Inputf("proj_type %s stops APOLLO at %s of %d x %d: it scales the gradient along the "+
				"longer side", l.Projection, p.Name, rows, columns).WithHint("use proj_type std")
		}
	}
	if len(l.targets) == 0 {
		return l.Place.Inputf("no linear module of %s is named for %s", j.Model.Name, l.kind).
			WithHint("its linear modules are " + strings.Join(lastNames(network.Linears()), ", "))
	}
	return nil
}

// decomposes reports whether projections are of singular vectors.
func (l *lowRank) decomposes() bool { return !l.Random }

// left reports whether the rows of a matrix are projected, and not its columns.
func (l *lowRank) left(rows, columns int64) bool {
	switch l.Projection {
	case "std":
		return rows < columns
	case "reverse_std":
		return rows >= columns
	}
	return l.Projection == "left"
}

// projected are the sizes of a matrix, of its projection and of its projector, in elements.
type projected struct {
	rows, columns, least, rank, low int64
	kept                            []int64 // elements of the projector
	size                            int64   // of an element of the gradient that is projected
}

// project returns the sizes for a parameter. A projector of singular vectors in fp32 is a view of all of them: their
// memory stays. In other types it is a copy of the first ones.
func (l *lowRank) project(p *autograd.Parameter) projected {
	s := projected{rows: p.Rows, columns: p.Elements / p.Rows, rank: int64(l.Rank), size: p.DType.Size()}
	s.least = min(s.rows, s.columns)
	if strings.HasSuffix(l.kind, "adafactor") {
		s.size = 4
	}
	kept := s.rank
	if l.decomposes() {
		if s.rank = min(s.rank, s.least); s.size == 4 {
			kept = s.least
		} else {
			kept = s.rank
		}
	}
	switch left := l.left(s.rows, s.columns); {
	case l.Projection == "full":
		s.low, s.kept = s.rank*s.rank, []int64{s.rows * kept, kept * s.columns}
	case left:
		s.low, s.kept = s.rank*s.columns, []int64{s.rows * kept}
	default:
		s.low, s.kept = s.rows*s.rank, []int64{kept * s.columns}
	}
	return s
}

// states returns the projector and the moments of a parameter.
func (l *lowRank) states(p *autograd.Parameter) []State {
	if !l.targets[p.Name] {
		return l.plainStates(p)
	}
	s := l.project(p)
	var list []State
	for _, elements := range s.kept {
		list = append(list, State{"projector", elements * s.size})
	}
	low := *p
	low.Elements = s.low
	switch low.Rows = s.low / s.columns; {
	case l.Projection == "full":
		low.Rows = s.rank
	case !l.left(s.rows, s.columns):
		low.Rows = s.rows
	}
	list = append(list, l.plainStates(&low)...)
	if strings.HasPrefix(l.kind, apollo) {
		list = append(list, State{"scaled_grad", p.DType.Size()})
	}
	return list
}

// plainStates are those of a gradient as it is.
func (l *lowRank) plainStates(p *autograd.Parameter) []State {
	switch {
	case strings.HasSuffix(l.kind, "adafactor"):
		return append(factored(p), State{"RMS", 4})
	case strings.HasSuffix(l.kind, "8bit"):
		return blockwise("state1", "state2")(p)
	}
	return sameShape("exp_avg", "exp_avg_sq")(p)
}

// temporaries are those of the parameter that makes the most.
func (l *lowRank) temporaries(parameters []*autograd.Parameter) []ledger.Bytes {
	var most []ledger.Bytes
	sum := func(list []ledger.Bytes) (all ledger.Bytes) {
		for _, bytes := range list {
			all += bytes
		}
		return all
	}
	for _, p := range parameters {
		for _, list := range l.updating(p) {
			if sum(list) > sum(most) {
				most = list
			}
		}
	}
	return most
}

// updating returns the temporaries at the peaks of a parameter's update: when a projector is made, and when the update
// is back in full size.
func (l *lowRank) updating(p *autograd.Parameter) [][]ledger.Bytes {
	several := func(n int, elements, size int64) []ledger.Bytes {
		return slices.Repeat([]ledger.Bytes{ledger.Bytes(elements * size)}, n)
	}
	adafactor, eight := strings.HasSuffix(l.kind, "adafactor"), strings.HasSuffix(l.kind, "8bit")
	narrow := p.DType.Size() < 4
	if !l.targets[p.Name] {
		switch {
		case eight: // a kernel
			return nil
		case adafactor && narrow: // the gradient, the parameter and two for the update
			return [][]ledger.Bytes{several(4, p.Elements, 4)}
		}
		return [][]ledger.Bytes{several(2, p.Elements, p.DType.Size())} // denom and norm_grad
	}
	s := l.project(p)
	back := slices.Concat(several(2, p.Elements, s.size), several(3, s.low, s.size))
	switch {
	case adafactor && narrow:
		back = slices.Concat(several(3, p.Elements, 4), several(2, s.low, 4))
	case adafactor:
		back = slices.Concat(several(2, p.Elements, 4), several(2, s.low, 4))
	case eight: // beside the weight, which waits in a copy
		back = slices.Concat(several(3, p.Elements, s.size), several(2, s.low, s.size))
	case l.ByChannel:
		back = append(back, several(1, max(s.rows, s.columns), s.size)...)
	}
	var made []ledger.Bytes
	if narrow {
		made = several(1, p.Elements, 4)
	}
	if !l.decomposes() {
		return [][]ledger.Bytes{back, append(made, several(2, s.kept[0], 4)...)}
	}
	product := int64(0) // of singular vectors and values, which nothing uses
	switch {
	case l.Projection == "full":
	case l.left(s.rows, s.columns):
		product = s.rank * s.columns
	default:
		product = s.rows * s.rank
	}
	const workspace = 2
	return [][]ledger.Bytes{back, slices.Concat(made, several(1+workspace, p.Elements, 4),
		several(1, s.rows*s.least, 4), several(1, s.least*s.columns, 4), several(1, product, 4))}
}

// needsFull reports whether the states depend on the full shape or the name of a parameter, or are of one block.
func (o *Optimizer) needsFull() bool { return o.kind.full }

// refuseParts refuses jobs in which a rank has parts of matrices only, for optimizers that need all of one.
func (j *Job) refuseParts() error {
	o := &j.Optimizer
	if !o.needsFull() {
		return nil
	}
	sharded := j.DeepSpeed != nil || j.FSDP != nil || j.Parallel.Tensor > 1 || j.Parallel.Expert > 1
	return refuse(
		contradiction{sharded, o.Name + " updates full tensors, but ranks have parts of them, which is not planned",
			"leave DeepSpeed, FSDP and parallelism out: each rank then has all of the model"},
		contradiction{j.Adapter != nil, o.Name + " is not planned with an adapter",
			"use --optimizer adamw, or leave the adapter out"},
		contradiction{o.Name == badam && j.World > 1, "BAdam is planned on one GPU only: with several LLaMA-Factory " +
			"needs ZeRO-3", "give --gpus 1"},
	)
}
