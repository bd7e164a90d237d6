//go:build linux

package watch

import (
	"iter"
	"maps"
	"slices"
	"strings"

	"plimsoll/internal/after/evidence"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/samples"
	"plimsoll/internal/machine/probe"
)

// phases knows where every rank is in its training loop. Marks of the client count most. A rank without them is where
// its log says or, before its first step, where its memory seems to say. Else its phase is unknown, and empty.
type phases struct {
	ranks map[int]*rankPhase
	// named are processes that have sent a mark, and the rank that each is. With torchrun between plimsoll and the
	// ranks, only the marks tell them apart.
	named map[int]int
}

// rankPhase is where a rank is.
type rankPhase struct {
	begun     bool
	pid       int
	source    samples.MarkSource // of the last mark; empty for none
	phase     ledger.PhaseName
	iteration ledger.Iteration
	step      int64
	weights   ledger.Bytes // pages of files of weights that its processes mapped, when that was last read
}

func newPhases() phases { return phases{ranks: map[int]*rankPhase{}, named: map[int]int{}} }

// started begins a rank, or begins it again. The first mark of a rank may come before.
func (p *phases) started(root probe.Root) {
	if r := p.rank(root.Rank); r.begun {
		p.ranks[root.Rank] = &rankPhase{}
		maps.DeleteFunc(p.named, func(_, rank int) bool { return rank == root.Rank })
	}
	r := p.rank(root.Rank)
	r.begun, r.pid = true, root.PID
}

func (p *phases) rank(number int) *rankPhase {
	if p.ranks[number] == nil {
		p.ranks[number] = &rankPhase{}
	}
	return p.ranks[number]
}

// marked takes a mark of the client.
func (p *phases) marked(m *samples.Mark) {
	p.named[m.PID] = m.Rank
	p.rank(m.Rank).take(m)
}

func (r *rankPhase) take(m *samples.Mark) {
	r.pid, r.source, r.phase, r.iteration, r.step = m.PID, m.Source, m.Phase, m.Iteration, m.Step
}

// printed takes what a rank has printed of its progress. It returns a mark if that is news.
func (p *phases) printed(rank int, progress evidence.Progress) *samples.Mark {
	r := p.rank(rank)
	if r.source == samples.FromClient {
		return nil
	}
	m := &samples.Mark{Rank: rank, PID: r.pid, Phase: progress.Phase, Step: max(r.step, progress.Step),
		Source: samples.FromLog}
	m.Iteration = iteration(m.Phase, m.Step)
	if r.source == samples.FromLog && m.Phase == r.phase && m.Step == r.step {
		return nil
	}
	r.take(m)
	return m
}

// iteration returns the iteration of a phase in the training loop.
func iteration(phase ledger.PhaseName, step int64) ledger.Iteration {
	switch {
	case phase == ledger.Load || phase == ledger.Initialize || phase == ledger.Checkpoint || step <= 0:
		return ledger.Once
	case step == 1:
		return ledger.First
	default:
		return ledger.Steady
	}
}

// assign gives every process of a sample its phase. It returns marks of phases that it has inferred.
func (p *phases) assign(s *samples.Sample) []*samples.Mark {
	p.nameRanks(s)
	marks := p.infer(s)
	common := p.common()
	for i := range s.Processes {
		process := &s.Processes[i]
		r := common
		if process.Rank != samples.NoRank {
			r = p.ranks[process.Rank]
		}
		if r != nil {
			process.Phase, process.Iteration, process.Step = r.phase, r.iteration, r.step
		}
	}
	return marks
}

// nameRanks gives processes that have sent marks, and their descendants, the rank that the marks name. A rank that has
// others below it is their launcher, and no rank.
func (p *phases) nameRanks(s *samples.Sample) {
	if len(p.named) == 0 {
		return
	}
	t := tree{}
	for i := range s.Processes {
		t[s.Processes[i].PID] = &s.Processes[i]
	}
	launchers := map[int]bool{}
	for pid, rank := range p.named {
		for process := range t.upFrom(t[pid]) {
			if process.Role == samples.RankProcess && process.Rank != rank {
				launchers[process.PID] = true
			}
		}
	}
	for i := range s.Processes {
		process := &s.Processes[i]
		for above := range t.upFrom(process) {
			if launchers[above.PID] {
				p.nameRank(process, t)
				break
			}
		}
	}
}

// nameRank names the rank of a process below a launcher.
func (p *phases) nameRank(process *samples.Process, t tree) {
	for above := range t.upFrom(process) {
		rank, named := p.named[above.PID]
		if !named {
			continue
		}
		if process.Rank = rank; above == process {
			process.Role = samples.RankProcess
		}
		return
	}
	process.Rank, process.Role = samples.NoRank, samples.Child
}

// tree is the processes of a sample by PID.
type tree map[int]*samples.Process

// upFrom returns a process and all above it.
func (t tree) upFrom(process *samples.Process) iter.Seq[*samples.Process] {
	return func(yield func(*samples.Process) bool) {
		for process != nil && yield(process) {
			child := process
			if process = t[child.Parent]; process != nil && process.StartTime > child.StartTime {
				return // it is a later process with that PID
			}
		}
	}
}

// common returns the phase that all ranks are in, for processes that belong to no single rank. It is nil if the ranks
// are in different phases.
func (p *phases) common() *rankPhase {
	var common *rankPhase
	for _, r := range p.ranks {
		if common != nil && (r.phase != common.phase || r.iteration != common.iteration || r.step != common.step) {
			return nil
		}
		common = r
	}
	return common
}

// weightFiles are the ends of the names of files with weights.
var weightFiles = []string{".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".distcp", ".gguf"}

// loadingSize is how much more of its files of weights a rank that loads has in memory at each reading.
const loadingSize = 16 << 20

// infer finds ranks that load a model: no client and no log has said a word, and more and more pages of files with
// weights are mapped. It returns a mark where the phase has changed. Mappings are not read in every sample; in between
// the phase stays.
func (p *phases) infer(s *samples.Sample) []*samples.Mark {
	var marks []*samples.Mark
	for number, r := range p.ranks {
		weights, read := weightsOf(number, s)
		if !read || r.source != "" && r.source != samples.FromBehavior {
			continue
		}
		var phase ledger.PhaseName
		if weights >= r.weights+loadingSize {
			phase = ledger.Load
		}
		r.weights = weights
		if phase != r.phase {
			m := &samples.Mark{Rank: number, PID: r.pid, Phase: phase, Source: samples.FromBehavior}
			r.take(m)
			marks = append(marks, m)
		}
	}
	return marks
}

// weightsOf returns how much of files with weights a rank has mapped and in memory, and whether the sample tells.
func weightsOf(rank int, s *samples.Sample) (weights ledger.Bytes, read bool) {
	for _, process := range s.Processes {
		if process.Rank != rank {
			continue
		}
		read = read || process.Mappings != nil
		for _, m := range process.Mappings {
			hasEnd := func(end string) bool { return strings.HasSuffix(m.Name, end) }
			if m.Kind == samples.FileMapping && slices.ContainsFunc(weightFiles, hasEnd) {
				weights += m.Resident
			}
		}
	}
	return weights, read
}
