package explain

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"plimsoll/internal/after/evidence"
	"plimsoll/internal/base/lazyregexp"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/samples"
	"plimsoll/internal/machine/binding"
)

// levels are what the last sample before the first rank's end shows.
type levels struct {
	at        evidence.Line
	node      samples.Node
	groups    []samples.Group
	gpus      []samples.GPU
	processes []samples.Process
	read      map[int]reading // by PID
	ended     []samples.Mark  // the last mark of each rank that has measured
	// falling is by how much the available memory of the host has fallen since the sample, if it went on falling as
	// between the sample and the one before.
	falling ledger.Bytes
	// before is how long before the first end the sample was taken, or 0 if unknown.
	before time.Duration
	// rise is by how much the memory of all ranks has risen a second, over the last samples.
	rise ledger.Bytes
	// bound are the ranks whose memory policy leaves them only some NUMA nodes.
	bound []samples.BoundRank
}

// findings returns what a recording says, in the types of what files say.
func (r *Recording) findings() []evidence.Finding {
	var found []evidence.Finding
	output := newOutputs(r.Name)
	for _, record := range r.outputs.all() {
		output.add(record.Output, r.at(&record))
	}
	if r.start != nil {
		found = limitsOf(r.start.Start.Limits, r.at(r.start))
	}
	for _, record := range r.marks.all() {
		at := r.at(&record)
		at.Rank = record.Mark.Rank
		at.Fact = evidence.Progress{Phase: record.Mark.Phase, Step: record.Mark.Step}
		found = append(found, at)
	}
	if r.end != nil {
		at := r.at(r.end)
		found = append(found, slices.DeleteFunc(endOf(r.end.End, at, r.Began()), r.hidesEnd)...)
		if r.start != nil {
			found = append(found, countersOf(r.start.Start, r.end.End, at)...)
		}
	}
	return append(r.withRanks(output.findings()), found...)
}

// withRanks gives kills of the kernel the ranks of the processes. Run records only kills of the job's processes. One
// that no sample has lived for less than the time between two: it is of the only rank, if there is one.
func (r *Recording) withRanks(found []evidence.Finding) []evidence.Finding {
	ranks := map[int]int{}
	for _, record := range r.samples.all() {
		for _, p := range record.Sample.Processes {
			ranks[p.PID] = p.Rank
		}
	}
	only := evidence.NoRank
	if r.end != nil && len(r.end.End.Ranks) == 1 {
		only = r.end.End.Ranks[0].Rank
	}
	for i := range found {
		kill, ok := found[i].Fact.(evidence.KernelKill)
		if !ok || found[i].Rank != evidence.NoRank {
			continue
		}
		rank, sampled := ranks[kill.PID]
		if !sampled {
			rank = only
		}
		found[i].Rank = rank
	}
	return found
}

// hidesEnd reports whether a finding is an exit code 0 that is only that of the last program of a pipe.
func (r *Recording) hidesEnd(f evidence.Finding) bool {
	end, ok := f.Fact.(evidence.ProcessEnded)
	return ok && mannerOfProcess(end) == unended && r.isPipe()
}

// isPipe reports whether the recorded command is a pipe of a shell that hides how its first programs end.
func (r *Recording) isPipe() bool {
	script, _ := r.script()
	return pipe.MatchString(script) && !strings.Contains(script, "pipefail") && !strings.Contains(script, "PIPESTATUS")
}

// script returns the commands that the recorded program, a shell, has run. They are empty where they are in a file.
func (r *Recording) script() (commands string, isShell bool) {
	if r.start == nil {
		return "", false
	}
	command := r.start.Start.Command
	at := slices.IndexFunc(command, shells.MatchString)
	if at < 0 || at > mostWrappers {
		return "", false
	}
	for i, option := range command[at+1:] {
		if !strings.HasPrefix(option, "-") {
			break
		}
		if rest := command[at+i+2:]; shellCommand.MatchString(option) && len(rest) > 0 {
			return rest[0], true
		}
	}
	return "", true
}

// mayHideFailure reports whether the exit code of the recorded command may be that of another program than the one that
// failed: a shell's is that of its last command.
func (r *Recording) mayHideFailure() bool {
	commands, isShell := r.script()
	return isShell && (commands == "" || several.MatchString(commands))
}

// mostWrappers is how many words may stand before a shell, such as "timeout 600".
const mostWrappers = 4

var (
	shells       = lazyregexp.New(`(?:^|/)(?:ba|da|z|k)?sh$`)
	pipe         = lazyregexp.New(`[^|]\|[^|]`)
	shellCommand = lazyregexp.New(`^-[a-z]*c[a-z]*$`)
	several      = lazyregexp.New(`[;|&\n]`)
)

// outputs are the lines that ranks have printed, as one text for each rank.
type outputs struct {
	name  string
	ranks []int
	texts map[int]*strings.Builder
	lines map[int][]evidence.Finding // of each rank: where and when each line was recorded
}

func newOutputs(name string) *outputs {
	return &outputs{name: name, texts: map[int]*strings.Builder{}, lines: map[int][]evidence.Finding{}}
}

func (o *outputs) add(output *samples.Output, at evidence.Finding) {
	text := o.texts[output.Rank]
	if text == nil {
		text = &strings.Builder{}
		o.texts[output.Rank], o.ranks = text, append(o.ranks, output.Rank)
	}
	for _, line := range output.Lines {
		text.WriteString(strings.ReplaceAll(line, "\n", " ") + "\n")
		o.lines[output.Rank] = append(o.lines[output.Rank], at)
	}
}

// findings returns what the lines say.
func (o *outputs) findings() []evidence.Finding {
	var found []evidence.Finding
	for _, rank := range o.ranks {
		source, err := evidence.Read(o.name, strings.NewReader(o.texts[rank].String()))
		if err != nil {
			continue // the rank has printed nothing that is text
		}
		several := slices.ContainsFunc(source.Findings, ofSeveralRanks)
		for _, f := range source.Findings {
			end, ended := f.Fact.(evidence.ProcessEnded)
			if ended && end.By == "shell" && end.Signal == 0 && source.Lines == 1 {
				continue // a number that the rank has printed: the recording knows its exit code
			}
			f.Left = source.Lines - f.Number
			if f.Number > 0 && f.Number <= len(o.lines[rank]) {
				at := o.lines[rank][f.Number-1]
				f.Number, f.Time = at.Number, at.Time
			}
			if f.Rank == evidence.NoRank && !several {
				f.Rank = rank
			}
			found = append(found, f)
		}
	}
	return found
}

// launchers of ranks may be the recorded process. What it prints without a label is of any of them.
var launchers = map[string]bool{"DeepSpeed": true, "torchrun": true, "torch.multiprocessing": true, "mpirun": true,
	"mpiexec": true}

// ofSeveralRanks reports whether a line is of a process that has started ranks.
func ofSeveralRanks(f evidence.Finding) bool {
	end, ended := f.Fact.(evidence.ProcessEnded)
	return ended && launchers[end.By]
}

// signs returns the lines that speak of a failure, in the recorded output.
func (r *Recording) signs() []evidence.Finding {
	output := newOutputs(r.Name)
	for _, record := range r.outputs.all() {
		output.add(record.Output, r.at(&record))
	}
	var signs []evidence.Finding
	for _, rank := range output.ranks {
		source, err := evidence.Read(output.name, strings.NewReader(output.texts[rank].String()))
		if err != nil {
			continue // the rank has printed nothing that is text
		}
		for _, f := range source.Signs {
			if f.Number > 0 && f.Number <= len(output.lines[rank]) {
				at := output.lines[rank][f.Number-1]
				f.Number, f.Time = at.Number, at.Time
			}
			f.Rank = rank
			signs = append(signs, f)
		}
	}
	return signs
}

// limitsOf returns the limits that the ranks started with.
func limitsOf(limits *samples.Limits, at evidence.Finding) []evidence.Finding {
	if limits == nil {
		return nil
	}
	var found []evidence.Finding
	for _, l := range []struct {
		name  string
		bytes ledger.Bytes
	}{{"RLIMIT_AS", limits.AddressSpace}, {"RLIMIT_MEMLOCK", limits.Locked}, {"RLIMIT_FSIZE", limits.FileSize}} {
		at.Text = fmt.Sprintf("%s %d", l.name, l.bytes)
		at.Fact = evidence.Limit{Name: l.name, Bytes: evidence.Size{Bytes: max(l.bytes, 0), Known: l.bytes >= 0}}
		found = append(found, at)
	}
	return found
}

// endOf returns how the ranks ended.
func endOf(end *samples.End, at evidence.Finding, began time.Time) []evidence.Finding {
	var found []evidence.Finding
	if end.ByUser {
		at.Fact = evidence.BatchEnd{By: "plimsoll", Reason: "cancelled"}
		at.Text = "by_user"
		found = append(found, at)
	}
	for _, rank := range end.Ranks {
		if rank.Unknown {
			continue
		}
		at.Rank, at.Time = rank.Rank, began.Add(rank.Time)
		at.Text = fmt.Sprintf("rank %d ended with exit code %d and signal %d", rank.Rank, rank.ExitCode, rank.Signal)
		at.Fact = evidence.ProcessEnded{By: recorder, Rank: rank.Rank, LocalRank: evidence.NoRank, PID: rank.PID,
			ExitCode: rank.ExitCode, Signal: rank.Signal, Victim: rank.Asked}
		found = append(found, at)
	}
	return found
}

// recorder is who saw the end of a process where the signal is known for sure.
const recorder = "plimsoll"

func countersOf(start *samples.Start, end *samples.End, at evidence.Finding) []evidence.Finding {
	was := map[string]samples.Counter{}
	for _, c := range start.Counters {
		was[c.Name] = c
	}
	counts := oomCounts{compared: true, complete: true}
	for _, c := range end.Counters {
		count := oomCount{name: c.Name, group: c.Group, kills: c.Kills - was[c.Name].Kills,
			reached: c.Reached - was[c.Name].Reached, limit: c.Limit}
		if c.Group == "the host" {
			count.group = ""
		}
		counts.counts = append(counts.counts, count)
	}
	if len(counts.counts) == 0 {
		return nil
	}
	at.Text, at.Fact = "counters of the kernel's OOM killer", counts
	return []evidence.Finding{at}
}

// lastLevels returns the last sample before a rank ended, or nil if there is none.
func (r *Recording) lastLevels() *levels {
	l := &levels{}
	if r.start != nil {
		l.bound = slices.DeleteFunc(slices.Clone(r.start.Start.Ranks), func(rank samples.BoundRank) bool {
			return rank.MemoryPolicy != binding.PolicyBind
		})
	}
	firstEnd := r.firstEnd()
	var trend trend
	found, before := false, time.Duration(0)
	for _, record := range r.samples.all() {
		if firstEnd > 0 && record.Time > firstEnd {
			break
		}
		found = true
		l.at = evidence.Line{File: r.Name, Number: record.number, Text: fmt.Sprintf("sample at %v", record.Time)}
		if passed := record.Time - before; l.node.Memory > 0 && passed > 0 {
			fallen := float64(l.node.Available - record.Sample.Node.Available)
			l.falling = ledger.Bytes(fallen * float64(max(firstEnd-record.Time, 0)) / float64(passed))
		}
		before, l.before = record.Time, max(firstEnd-record.Time, 0)
		l.node, l.groups, l.gpus = record.Sample.Node, record.Sample.Groups, record.Sample.GPUs
		l.keep(record.Sample.Processes)
		trend.add(record.Time, l.processes)
	}
	l.ended, l.rise = r.lastMeasured(firstEnd), trend.rise()
	if !found {
		return nil
	}
	return l
}

// trend is the memory of all ranks in the last samples.
type trend []struct {
	time  time.Duration
	bytes ledger.Bytes
}

// trendSamples is how many samples tell how fast memory grows.
const trendSamples = 10

func (t *trend) add(at time.Duration, processes []samples.Process) {
	var sum ledger.Bytes
	for _, p := range processes {
		sum += p.Proportional.Anonymous + p.Proportional.Shared
	}
	*t = append(*t, struct {
		time  time.Duration
		bytes ledger.Bytes
	}{at, sum})
	if len(*t) > trendSamples {
		*t = (*t)[1:]
	}
}

// rise returns by how much memory has risen a second, or 0.
func (t trend) rise() ledger.Bytes {
	if len(t) < 2 {
		return 0
	}
	first, last := t[0], t[len(t)-1]
	if last.time <= first.time || last.bytes <= first.bytes {
		return 0
	}
	return ledger.Bytes(float64(last.bytes-first.bytes) / (last.time - first.time).Seconds())
}

// lastMeasured returns the last mark of each rank that has measured, up to a time; 0 for the end.
func (r *Recording) lastMeasured(until time.Duration) []samples.Mark {
	last := map[int]samples.Mark{}
	for _, record := range r.measured.all() {
		if until > 0 && record.Time > until {
			break
		}
		last[record.Mark.Rank] = *record.Mark
	}
	return slices.Collect(maps.Values(last))
}

// firstEnd returns the time at which the first rank ended by itself, or 0.
func (r *Recording) firstEnd() time.Duration {
	if r.end == nil {
		return 0
	}
	for _, rank := range r.end.End.Ranks {
		if !rank.Asked {
			return rank.Time
		}
	}
	return 0
}

func hasRanks(s *samples.Sample) bool {
	for _, p := range s.Processes {
		if p.Role == samples.RankProcess {
			return true
		}
	}
	return false
}

// reading is what was resident of a process when its proportional share was read, and that share.
type reading struct{ resident, proportional samples.Kinds }

// keep takes the processes of a sample. Mappings are read less often, so those of an earlier sample stay. So is the
// share of a large process: what has become resident since is its own.
func (l *levels) keep(processes []samples.Process) {
	mappings := map[int][]samples.Mapping{}
	nodes := map[int][]samples.NUMANode{}
	for _, p := range l.processes {
		mappings[p.PID], nodes[p.PID] = p.Mappings, p.NUMANodes
	}
	read := map[int]reading{}
	l.processes = nil
	for _, p := range processes {
		if p.Mappings == nil {
			p.Mappings = mappings[p.PID]
		}
		if p.NUMANodes == nil {
			p.NUMANodes = nodes[p.PID]
		}
		read[p.PID] = reading{p.Resident, p.Proportional}
		if was, known := l.read[p.PID]; known && was.proportional == p.Proportional {
			read[p.PID] = was
			p.Proportional.Anonymous += max(p.Resident.Anonymous-was.resident.Anonymous, 0)
		}
		l.processes = append(l.processes, p)
	}
	l.read = read
}

// of returns the processes of a rank, or all of them for no rank.
func (l *levels) of(rank int) []samples.Process {
	if rank == evidence.NoRank {
		return l.processes
	}
	var found []samples.Process
	for _, p := range l.processes {
		if p.Rank == rank {
			found = append(found, p)
		}
	}
	return found
}

// exhaustedNode returns the NUMA node without free memory while the host has plenty, or nil.
func (l *levels) exhaustedNode() *samples.NUMAFree {
	if l == nil || len(l.node.NUMANodes) < 2 || l.node.Memory == 0 || l.node.Available < l.node.Memory/5 {
		return nil
	}
	for i := range l.node.NUMANodes {
		if n := &l.node.NUMANodes[i]; n.Memory > 0 && n.Free < n.Memory/20 {
			return n
		}
	}
	return nil
}
