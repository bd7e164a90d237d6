package plan

import (
	"cmp"
	"slices"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/megatron"
	"plimsoll/internal/plan/forward"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/simulate"
)

// Spread says how far a run may be from the plan of its job, mechanism by mechanism. Each is the size of something that
// may be there once more or once less, and none was fitted to measurements of training runs. The last source is for
// what no mechanism knows: its size comes from runs.
type Spread struct {
	workspace ledger.Bytes // of a handle of cuBLAS
	logits    ledger.Bytes // a copy of all logits of a pass, in the type that the model computes in
	earlier   ledger.Bytes // what the loss of an earlier release of the program takes more
	scores    ledger.Bytes // the scores of eager attention in all blocks, once, in that type
	attention ledger.Bytes // what the backward pass of fused attention adds up, in fp32
	ahead     ledger.Bytes // gathered ahead of its use
	compiled  ledger.Bytes // a tensor of the residual stream's width in every block; 0 without torch.compile
	varies    bool         // lengths vary, and were simulated in several orders
	fuller    ledger.Bytes // what the allocator reserves more in another of them
	longer    float64      // the longest sequences by the usual ones, less 1; 0 if lengths do not vary
	experts   bool         // ranks share experts, and the plan gives each as many tokens
	unknown   float64      // the share of what is no state that may be there more or less, for no reason that is known
	ranks     ledger.Bytes // of a node: their processes are alike, so what they lack or hold more adds up
}

// notModelled is the share of what is neither parameter, gradient nor state that runs held more or less than planned,
// beyond all mechanisms. With less, fewer than nine tenths of the sources of docs/accuracy.md are inside of their
// intervals. Plans of Megatron-LM need none: its own golden values hold without.
const notModelled = 0.15

// spreadOf returns the spread of a job with ranks of a class, which is a pipeline stage where the job has stages.
func spreadOf(j *job.Job, c simulate.RankClass) Spread {
	if j.Megatron != nil {
		s := spreadOfMegatron(j.Megatron)
		if e := j.Rollout; e != nil && e.Earlier {
			s.earlier = earlierLogits * 2 * s.logits
		}
		return s
	}
	n := j.Model.Network
	under := 1.0 // micro batches whose activations a rank holds at the same time
	if p := j.Pipeline; p != nil {
		each := j.World / int(p.Degree)
		stage := j.OfStage(int64(c.First / each))
		n, under = stage.Model.Network, p.UnderWay(stage.Stage.Index)
	}
	tensor, context := max(1, j.Parallel.Tensor), max(1, j.Parallel.Context)
	tokens := j.Sequences() * j.Sequence / context
	blocks := n.Blocks()
	if n.OnlyImages() {
		blocks = n.Towers[0].Network.Blocks()
	}
	computed := j.ComputeType()
	if j.AutocastType != dtype.Invalid {
		computed = j.AutocastType
	}
	s := Spread{
		workspace: j.GPU.Workspace(),
		logits:    ledger.Bytes(computed.Size() * tokens * n.Head.Outputs / tensor),
		ahead:     c.Ahead,
		experts:   j.Parallel.Expert > 1,
		unknown:   notModelled,
		ranks:     ledger.Bytes(c.RanksPerNode),
	}
	if c.Beyond != nil {
		s.varies, s.fuller = true, *c.Beyond
	}
	if j.UsualSequence > 0 && j.UsualSequence < j.Sequence {
		s.longer = float64(j.Sequence)/float64(j.UsualSequence) - 1
	}
	if j.Compile && (j.Recompute == nil || j.Recompute.Selective > 0) {
		s.compiled = ledger.Bytes(under * float64(computed.Size()*tokens*n.Hidden/tensor*int64(len(blocks))))
	}
	for _, b := range blocks {
		if j.Attention == forward.Eager {
			s.scores += ledger.Bytes(under * float64(computed.Size()*tokens*j.Sequence*b.Attention.Heads/tensor))
		} else {
			s.attention = max(s.attention, ledger.Bytes(4*tokens*n.Hidden/tensor))
		}
	}
	return s
}

// earlierLogits are the copies of the logits in fp32 that slime's loss had beyond those of today: 5.25 of 4 samples and
// 6 of one, where today's has 3 (get_log_probs_and_entropy of slime 0.2.1, measured with torch 2.15).
const earlierLogits = 3

// spreadOfMegatron returns the spread of a job of Megatron-LM.
func spreadOfMegatron(j *megatron.Job) Spread {
	tokens := j.Sequences() * j.Sequence / j.Degrees.Context
	workspace := j.GPU.Workspace()
	if j.Deterministic {
		workspace = simulate.DeterministicWorkspace
	}
	return Spread{
		workspace: workspace,
		logits:    ledger.Bytes(2 * tokens * j.Vocabulary / j.Degrees.Tensor),
		attention: ledger.Bytes(4 * tokens * j.Hidden / j.Degrees.Tensor),
		experts:   j.Degrees.Expert > 1 && j.Imbalance == 1,
		ranks:     ledger.Bytes(j.RanksPerNode),
	}
}

// sources returns the mechanisms among components that a GPU's allocator holds at one instant.
func (s Spread) sources(held []ledger.Holding, phase *ledger.Phase) []ledger.Source {
	sum := func(components ...ledger.Component) (bytes ledger.Bytes) {
		for _, h := range held {
			if slices.Contains(components, h.Component) || slices.Contains(components, h.Component.PartOf()) {
				bytes += h.Bytes
			}
		}
		return bytes
	}
	var list sourceList
	workspace := min(s.workspace, sum(ledger.MatmulWorkspaces))
	list.add("cuBLAS workspaces", workspace, workspace, "a handle of cuBLAS more or fewer: each has a workspace of "+
		"its own")
	logits := min(s.logits, sum(ledger.LogitsAndLoss))
	list.add("copies of the logits", logits, logits, "the loss keeps one copy of the logits more or fewer, by "+
		"its implementation and version")
	if logits > 0 {
		list.add("earlier releases", 0, s.earlier, "before April 2026 slime's loss copied the logits of each sample, "+
			"and kept more for entropies: --rollout release=current rules that out")
	}
	scores := min(s.scores, sum(ledger.AttentionScores))
	list.add("attention scores", scores, scores, "eager attention keeps the scores of every block once more or once "+
		"less, by its version")
	scratch := sum(ledger.OperationScratch)
	attention := ledger.Bytes(0)
	if phase.Name == ledger.Backward {
		attention = min(s.attention, scratch)
	}
	list.add("scratch of kernels", scratch, attention, "fused kernels have no temporaries of their own; the backward "+
		"pass of attention may add up once more in fp32")
	ahead := min(s.ahead, sum(ledger.GatheredParameters))
	list.add("gathers ahead", ahead, ahead, "the host runs ahead of the GPU: one unit more or fewer is gathered")
	activations := sum(ledger.Activations)
	compiled := min(s.compiled, activations)
	list.add("torch.compile", compiled, compiled, "a partition of the graph that keeps one tensor of the residual "+
		"stream's width more or fewer in every block")
	if phase.Iteration == ledger.Steady {
		longer := ledger.Bytes(s.longer * float64(activations+sum(ledger.LogitsAndLoss)))
		list.add("lengths", 0, longer, "a later micro batch has the longest sequences, too")
	}
	if s.experts {
		list.add("experts", 0, sum(ledger.FeedForwardActivations)/4, "the fullest rank of experts has a quarter more "+
			"tokens than the mean: the room that a capacity factor of 1.25 leaves (GShard, Switch Transformer)")
	}
	states := sum(ledger.Parameters, ledger.Gradients, ledger.MasterWeights, ledger.OptimizerStates,
		ledger.OptimizerTemporaries) // which are another source
	var all ledger.Bytes
	for _, h := range held {
		all += h.Bytes
	}
	unknown := ledger.Bytes(s.unknown * float64(max(0, all-states)))
	list.add("what is not modelled", unknown, unknown, "runs that nobody had seen held more or less beside "+
		"states, for reasons that no mechanism here has")
	list.add("optimizer step", sum(ledger.OptimizerTemporaries), 0, "a step that is fused, or goes through parameters "+
		"one by one, has no temporaries of all parameters")
	return list
}

// sourceList is a list of mechanisms of some size.
type sourceList []ledger.Source

func (list *sourceList) add(name string, below, above ledger.Bytes, reason string) {
	if below > 0 || above > 0 {
		*list = append(*list, ledger.Source{Name: name, Below: max(0, below), Above: max(0, above), Reason: reason})
	}
}

// Allocated returns the interval of the allocated bytes at the peak of phases of a GPU.
func (s Spread) Allocated(phases []ledger.Phase) ledger.Interval {
	var peak, lower, upper ledger.Bytes
	var deciding []ledger.Source
	for i := range phases {
		p := &phases[i]
		list := s.sources(p.Components, p)
		below, above := ledger.Spread(list)
		peak, lower = max(peak, p.PeakAllocated), max(lower, p.PeakAllocated-below)
		if p.PeakAllocated+above > upper {
			upper, deciding = p.PeakAllocated+above, list
		}
	}
	return intervalOf(lower, upper, deciding)
}

// AllocatedAtEnd returns the interval of the allocated bytes at the end of a phase of a GPU.
func (s Spread) AllocatedAtEnd(p *ledger.Phase) ledger.Interval {
	list := s.sources(p.End, &ledger.Phase{Name: p.Name})
	below, above := ledger.Spread(list)
	return intervalOf(p.EndAllocated-below, p.EndAllocated+above, list)
}

// Reserved returns the interval of reserved bytes behind these phases of a GPU, or of resident bytes of a host.
func (s Spread) Reserved(kind ledger.Kind, reserved ledger.Bytes, phases []ledger.Phase) ledger.Interval {
	var allocated ledger.Bytes
	for _, p := range phases {
		allocated = max(allocated, p.PeakAllocated)
	}
	fragments := max(0, reserved-allocated)
	var parts []ledger.Source
	var list sourceList
	if kind == ledger.Host {
		twice := masterGradients(phases)
		list.add("gradients on the host", 0, twice, "DeepSpeed issue 7693 measured the offloaded gradients twice, "+
			"behind a name that is bound again; others did not reproduce it")
		parts = append(parts, ledger.Source{Above: twice})
	}
	reason := "the heap of the C library returns holes to the system, or has as many again"
	if kind == ledger.GPU {
		i := s.Allocated(phases)
		parts, list = append(parts, ledger.Source{Below: allocated - i.Lower, Above: i.Upper - allocated}), i.Sources
		reason = "what the allocator has reserved beyond the allocated blocks: none where its cache is reused or " +
			"emptied, as much again where frees come in another order"
	}
	beyond := fragments
	if kind == ledger.GPU && s.varies {
		beyond = max(fragments, s.fuller)
		reason = "what lengths leave behind: nothing where the longest come first, and as much again in other orders " +
			"and over more steps"
	}
	list.add("fragments", fragments, beyond, reason)
	below, above := ledger.Spread(append(parts, ledger.Source{Below: fragments, Above: beyond}))
	return intervalOf(reserved-below, reserved+above, list)
}

// masterGradients returns the most that offloaded gradients take in a phase.
func masterGradients(phases []ledger.Phase) (most ledger.Bytes) {
	for _, p := range phases {
		for _, h := range p.Components {
			if h.Component == ledger.MasterGradients {
				most = max(most, h.Bytes)
			}
		}
	}
	return most
}

// Used returns the interval of memory in use behind these phases of a device.
func (s Spread) Used(d *ledger.Device, used ledger.Bytes, phases []ledger.Phase) ledger.Interval {
	reserved := used
	for _, h := range d.Outside {
		reserved -= h.Bytes
	}
	i := s.Reserved(d.Kind, reserved, phases)
	list := sourceList(i.Sources)
	parts := []ledger.Source{{Below: reserved - i.Lower, Above: i.Upper - reserved}}
	for _, h := range d.Outside {
		ranks := ledger.Bytes(1)
		if d.Kind == ledger.Host {
			ranks = s.ranks
		}
		h.Bytes /= ranks
		below, above, why := simulate.Apart(h)
		below, above = ranks*below, ranks*above
		list.add(h.Component.Title(), below, above, why)
		parts = append(parts, ledger.Source{Below: below, Above: above})
	}
	below, above := ledger.Spread(parts)
	return intervalOf(used-below, used+above, list)
}

// setIntervals sets the interval of every device's peak in use.
func (s Spread) setIntervals(devices []ledger.Device) {
	for i := range devices {
		d := &devices[i]
		d.Interval = s.Used(d, d.Peak().PeakUsed, d.Phases)
	}
}

// Widen adds a mechanism to the interval of a device's peak in use.
func Widen(d *ledger.Device, s ledger.Source) {
	peak, i := d.Peak().PeakUsed, d.Interval
	below, above := ledger.Spread([]ledger.Source{{Below: peak - i.Lower, Above: i.Upper - peak}, s})
	d.Interval = intervalOf(peak-below, peak+above, append(i.Sources, s))
}

// intervalOf returns an interval with its sources, the largest first.
func intervalOf(lower, upper ledger.Bytes, sources []ledger.Source) ledger.Interval {
	sorted := slices.Clone(sources)
	slices.SortStableFunc(sorted, func(a, b ledger.Source) int {
		return cmp.Or(cmp.Compare(b.Above, a.Above), cmp.Compare(b.Below, a.Below))
	})
	return ledger.Interval{Lower: max(0, lower), Upper: upper, Confidence: ledger.Confidence, Sources: sorted}
}
