package explain

import (
	"cmp"
	"slices"
	"strconv"
	"strings"
	"time"

	"plimsoll/internal/after/evidence"
	"plimsoll/internal/base/lazyregexp"
)

// manner is how a process ended.
type manner int

// The manners. Of several of one rank, the lowest counts.
const (
	lacked  manner = iota // an error of its own: memory or another resource was missing
	killed                // SIGKILL
	faulted               // SIGBUS
	raised                // another error of its own
	crashed               // another signal
	exited                // an exit code, and nothing else is known
	taken                 // because another rank had ended
	unended               // it has not ended, or well
)

// node is a process as far as the files tell processes apart: a rank, or what has a label of its own in a file. What
// has neither in a file is one process, with those who report on it.
type node struct {
	rank    int
	file    string // only without a rank
	process string // only without a rank
}

// labelled reports whether the files tell the process from others.
func (n node) labelled() bool { return n.rank != evidence.NoRank || n.process != "" }

// death is the end of a process.
type death struct {
	node
	how manner
	// says has what the files say of it; the first one orders it among others.
	says []evidence.Finding
	// The others are set once says is complete.
	pids  []int
	first bool      // a launcher names this end as the first
	ended time.Time // when a launcher saw it, or zero
	kill  time.Time // when the kernel has killed it, or zero
	tier  int       // the order in which ends are believed
}

const (
	exitKilled = 128 + evidence.SIGKILL
	exitBus    = 128 + evidence.SIGBUS
	exitTerm   = 128 + evidence.SIGTERM
)

// mannerOf returns how a process ended, as one fact tells it.
func mannerOf(fact evidence.Fact) manner {
	switch f := fact.(type) {
	case evidence.GPUOutOfMemory, evidence.DriverOutOfMemory, evidence.HostAllocationFailed, evidence.LockFailed,
		evidence.SharedMemoryFull, evidence.DiskFull, evidence.TooManyFiles:
		return lacked
	case evidence.TooManyProcesses:
		if f.Group == "" { // the kernel's log may speak of another job
			return lacked
		}
	case evidence.LibraryFailed:
		if f.Memory || f.Library == triton {
			return lacked
		}
		return raised
	case evidence.BusError:
		return faulted
	case evidence.WorkerEnded:
		return mannerOfWorker(f.Signal)
	case evidence.Exception:
		if f.Type == "SystemExit" && f.Message == "0" { // an exit that succeeds
			return unended
		}
		if isConsequence(f) {
			return taken
		}
		return raised
	case evidence.CollectiveFailed:
		return taken
	case evidence.ProcessEnded:
		return mannerOfProcess(f)
	}
	return unended
}

func mannerOfWorker(signal string) manner {
	switch s := strings.ToLower(signal); {
	case strings.Contains(s, "kill"):
		return killed
	case strings.Contains(s, "bus"):
		return faulted
	case s == "":
		return exited
	}
	return crashed
}

func mannerOfProcess(f evidence.ProcessEnded) manner {
	signal := f.Signal
	switch {
	case signal == evidence.SIGTERM && f.By == recorder && !f.Victim: // plimsoll run sent none, and no rank had ended
		return crashed
	case f.Victim || signal == evidence.SIGTERM || signal == evidence.SIGINT || f.ExitCode == exitTerm:
		return taken
	case signal == evidence.SIGKILL || f.ExitCode == exitKilled:
		return killed
	case signal == evidence.SIGBUS || f.ExitCode == exitBus:
		return faulted
	case signal != 0 || f.ExitCode > 128:
		return crashed
	case f.ExitCode != 0:
		return exited
	}
	return unended
}

// consequences are exceptions that follow from the end of another process.
var consequences = []string{"ChildFailedError", "CalledProcessError", "SystemExit", "KeyboardInterrupt",
	"SignalException", "ConnectionResetError", "ConnectionRefusedError", "BrokenPipeError", "EOFError",
	"DistBackendError", "DistNetworkError", "DistStoreError", "ActorDiedError", "RayActorError",
	"ClientConnectorError", "ServerDisconnectedError", "ActorUnavailableError",
	"WorkerCrashedError", "NodeDiedError", "ProcessExitedException", "EngineDeadError"}

// rootAbove is what an exception says that only repeats that another process has failed.
var rootAbove = lazyregexp.New(`(?i)\bsee (?:the )?(?:root cause|stack trace) \(?above\b`)

// peerGone is what an exception of C++ says that follows from the end of another process.
var peerGone = lazyregexp.New(`(?i)connection (?:reset|refused|closed)|broken pipe|\bpeer\b|timed out|timeout`)

func isConsequence(e evidence.Exception) bool {
	name := e.Type[strings.LastIndexAny(e.Type, ".:")+1:]
	if strings.Contains(e.Type, "C++") || strings.Contains(e.Type, "::") {
		return peerGone.MatchString(e.Message)
	}
	if name == "DistNetworkError" && strings.Contains(e.Message, "failed to listen") {
		return false // no peer takes part in that
	}
	return slices.Contains(consequences, name) || rootAbove.MatchString(e.Message)
}

// order finds the ends of the ranks, and which was first.
func (s *scene) order() {
	deaths := s.deaths()
	for _, d := range deaths {
		d.tier, d.kill = s.tierOf(d), s.killWords.times[firstOf(d.pids)]
	}
	first := -1
	for i, d := range deaths {
		if d.how < taken && (first < 0 || earlier(d, deaths[first])) {
			first = i
		}
	}
	if first >= 0 {
		s.witness = deaths[first]
		deaths = slices.Delete(deaths, first, first+1)
	}
	for _, d := range deaths {
		switch {
		case d.rank != evidence.NoRank && (s.witness == nil || d.rank != s.witness.rank):
			s.victims = append(s.victims, d)
		case !d.labelled() && s.witness != nil && d.how == s.witness.how:
			s.witness.says = append(s.witness.says, d.says...) // of the same process, without its label
		}
	}
	s.nameWitness()
	if local := s.localRank(); local != evidence.NoRank && s.witness.rank == evidence.NoRank && s.oneNode() {
		s.witness.rank = local
		s.victims = slices.DeleteFunc(s.victims, func(v *death) bool { return v.rank == local })
	}
}

// oneNode reports whether the files say that the job has one node, where the number of a rank there is its rank.
func (s *scene) oneNode() bool {
	said := false
	for _, f := range all[evidence.Setting](s.findings) {
		if f.fact.Name == evidence.Nodes {
			if f.fact.Value != "1" {
				return false
			}
			said = true
		}
	}
	return said
}

// deaths returns the end of each process.
func (s *scene) deaths() []*death {
	var list []*death
	index := map[node]*death{}
	for _, f := range s.findings {
		how := mannerOf(f.Fact)
		if _, batch := f.Fact.(evidence.BatchKill); batch && s.rankOf(f) != evidence.NoRank {
			how = killed
		}
		if s.killedByKernel(f.Fact) {
			how = killed // before its launcher asked it to end
		}
		if how == exited && (f.Uptime > 0 || s.index.kinds[f.File] == evidence.KernelLog) {
			continue // of a service of the host
		}
		if how == unended {
			continue
		}
		n := s.subject(f)
		d := index[n]
		if d == nil {
			d = &death{node: n, how: how}
			index[n] = d
			list = append(list, d)
		}
		d.add(f, how)
	}
	for _, f := range s.findings { // a shell or a pipe around the rank ended well, and hides the kill
		n := node{rank: f.Rank}
		if _, kill := f.Fact.(evidence.KernelKill); kill && f.Rank != evidence.NoRank && index[n] == nil {
			index[n] = &death{node: n, how: killed, says: []evidence.Finding{f}}
			list = append(list, index[n])
		}
	}
	for _, d := range list {
		d.settle()
	}
	return list
}

// killedByKernel reports whether a process ended by a kill of the kernel, whatever its launcher says.
func (s *scene) killedByKernel(fact evidence.Fact) bool {
	end, ok := fact.(evidence.ProcessEnded)
	return ok && end.Signal == evidence.SIGKILL && s.killWords.pids[end.PID]
}

// subject returns the process that a finding is about. A report names another process than the one that writes it.
func (s *scene) subject(f evidence.Finding) node {
	if rank := s.rankOf(f); rank != evidence.NoRank {
		return node{rank: rank}
	}
	n := node{rank: evidence.NoRank, file: f.File, process: f.Process}
	if pids := processes([]evidence.Finding{f}); len(pids) == 1 {
		if label, known := s.labels[pidOf{f.File, pids[0]}]; known {
			n.process = label
		}
	}
	return n
}

// pidOf is a process by its number, which other files may use for another one.
type pidOf struct {
	file string
	pid  int
}

// labelOfPID is how Ray, vLLM and journals write the number of a process into its label.
var labelOfPID = lazyregexp.New(`\bpid=(\d{1,9})\b|\[(\d{1,9})\]$`)

// nameProcesses notes the labels of processes by their numbers, and the ranks of those that also tell their rank.
func (s *scene) nameProcesses() {
	s.labels = map[pidOf]string{}
	for _, f := range s.findings {
		groups := labelOfPID.FindStringSubmatch(f.Process)
		if groups == nil {
			continue
		}
		pid, err := strconv.Atoi(groups[1] + groups[2])
		if err != nil {
			continue
		}
		s.labels[pidOf{f.File, pid}] = f.Process
		if _, known := s.ranks[pid]; !known && f.Rank != evidence.NoRank {
			s.ranks[pid] = f.Rank
		}
	}
}

// rankOf returns the rank of a finding, or evidence.NoRank. A launcher may name the rank of a process in another line.
func (s *scene) rankOf(f evidence.Finding) int {
	pid, own := 0, f.Rank
	switch fact := f.Fact.(type) {
	case evidence.ProcessEnded:
		pid = fact.PID
		if own == evidence.NoRank {
			own = fact.Rank
		}
	case evidence.BatchKill:
		pid = fact.PID
	case evidence.WorkerEnded:
		if len(fact.PIDs) == 1 {
			pid = fact.PIDs[0]
		}
	}
	if rank, ok := s.ranks[pid]; ok && own == evidence.NoRank {
		return rank
	}
	return own
}

// add adds what a file says. What tells most of the end comes first, and of that the earliest.
func (d *death) add(f evidence.Finding, how manner) {
	d.says = append(d.says, f)
	d.how = min(d.how, how)
}

// settle orders what the files say. A rank whose peers were gone has not ended by itself, whatever signal came next.
func (d *death) settle() {
	if waited(d) && d.how > lacked && d.labelled() {
		d.how = taken
	}
	slices.SortStableFunc(d.says, func(a, b evidence.Finding) int {
		if x, y := mannerOf(a.Fact) == d.how, mannerOf(b.Fact) == d.how; x != y {
			if x {
				return -1
			}
			return 1
		}
		return before(a, b)
	})
	d.pids = processes(d.says)
	for _, f := range all[evidence.ProcessEnded](d.says) {
		d.first = d.first || f.fact.First
		// Launchers look at all ranks, so that their times tell more than the order of lines in a log.
		if d.ended.IsZero() || f.Time.Before(d.ended) {
			d.ended = f.Time
		}
	}
}

// earlier reports whether one end came before another. An error that says what was missing goes before an exception,
// as programs also print exceptions that they handle.
func earlier(a, b *death) bool {
	if a.tier != b.tier {
		return a.tier < b.tier
	}
	if order := a.byKernel(b); order != 0 {
		return order < 0
	}
	if a.first != b.first {
		return a.first
	}
	if x, y := a.ended, b.ended; !x.IsZero() && !y.IsZero() && !x.Equal(y) {
		return x.Before(y)
	}
	if order := before(a.says[0], b.says[0]); order != 0 {
		return order < 0
	}
	return a.how < b.how
}

// byKernel orders two ends by the time of a kill of the kernel, which a launcher only sees when it looks. It returns 0
// where the kernel has killed neither, or a time is missing.
func (d *death) byKernel(other *death) int {
	a, b := cmp.Or(d.kill, d.ended), cmp.Or(other.kill, other.ended)
	if d.kill.IsZero() && other.kill.IsZero() || a.IsZero() || b.IsZero() {
		return 0
	}
	return a.Compare(b)
}

// tierOf returns the order in which an end is believed.
func (s *scene) tierOf(d *death) int {
	switch d.how {
	case lacked, faulted:
		return 0
	case killed:
		if s.confirmed(d) {
			return 0
		}
		return 1
	case raised:
		return 1
	}
	return 2
}

// confirmed reports whether the kernel, a counter or a batch system says that a process was killed for memory.
func (s *scene) confirmed(d *death) bool {
	w := &s.killWords
	return w.counted || w.trainer || len(w.pids) > 0 && len(d.pids) == 0 ||
		slices.ContainsFunc(d.pids, func(pid int) bool { return w.pids[pid] })
}

// killWords are what all words of kills say together.
type killWords struct {
	pids    map[int]bool // that the kernel has killed
	times   map[int]time.Time
	trainer bool // one of them has the name of a trainer
	counted bool // a counter or a batch system says so
}

func wordsOfKills(words []evidence.Finding) killWords {
	w := killWords{pids: map[int]bool{}, times: map[int]time.Time{}}
	for _, f := range words {
		switch fact := f.Fact.(type) {
		case evidence.KernelKill:
			w.pids[fact.PID] = true
			if fact.PID > 0 {
				w.times[fact.PID] = f.Time
			}
			w.trainer = w.trainer || trainerNames.MatchString(fact.Name)
		case evidence.BatchKill:
			w.counted = true
		case oomCounts:
			w.counted = w.counted || fact.kills() > 0
		}
	}
	return w
}

// firstOf returns the first of the processes, or 0 for none.
func firstOf(pids []int) int {
	if len(pids) == 0 {
		return 0
	}
	return pids[0]
}

// processes returns the processes of which findings speak.
func processes(findings []evidence.Finding) []int {
	var pids []int
	for _, f := range findings {
		switch fact := f.Fact.(type) {
		case evidence.ProcessEnded:
			pids = append(pids, fact.PID)
		case evidence.WorkerEnded:
			pids = append(pids, fact.PIDs...)
		}
	}
	return slices.DeleteFunc(pids, func(pid int) bool { return pid == 0 })
}

// setRecoveriesAside moves errors after which the same program went on from the findings to the recoveries: it has
// printed later steps, has ended well, or a launcher has started all ranks again.
func (s *scene) setRecoveriesAside() {
	type stream struct {
		file    string
		rank    int
		process string
	}
	type counter struct {
		stream
		epochs bool
	}
	advances := make([]bool, len(s.findings)) // the step is higher than all before
	last := map[counter]int64{}
	for i, f := range s.findings {
		if p, ok := f.Fact.(evidence.Progress); ok && p.Step >= 0 {
			key := counter{stream{f.File, f.Rank, f.Process}, p.Epoch}
			highest, known := last[key]
			advances[i] = !known || p.Step > highest
			last[key] = max(highest, p.Step)
		}
	}
	later, end, restarted := map[stream]int{}, map[stream]manner{}, map[string]bool{}
	most := map[stream]int{}     // later steps of that process of the job which has most
	masked := map[stream]bool{}  // the end may be that of another program than the one that failed
	handled := map[stream]int{}  // the line that says that the error before was dealt with
	another := map[stream]bool{} // a later error of the same program, that nothing overcame
	failed := map[string]bool{}  // a later line of the file is the end of a program, or a step of it
	// A later line says that a trainer has ended well, and another one before it that this trainer has begun.
	closed, begun := map[string]bool{}, map[string]bool{}
	recovered, completed := make([]bool, len(s.findings)), s.index.completed["Slurm"]
	for i, f := range slices.Backward(s.findings) {
		key, job := stream{f.File, f.Rank, f.Process}, stream{f.File, f.Rank, ""}
		how, ended := end[key]
		if !ended { // its process may have been one of several
			how, ended = end[job]
		}
		recovered[i] = restarted[f.File] && mannerOf(f.Fact) != unended ||
			handled[key] > 0 && handled[key]-f.Number <= handledDistance && mannerOf(f.Fact) <= raised ||
			s.mayRecover(f) && (ended && how == unended && !(f.Left <= lastWords && masked[key]) ||
				(!ended || another[key]) && most[job] >= enoughSteps(f.Fact)) ||
			begun[f.File] && mannerOf(f.Fact) == exited || closed[f.File] && isShellWord(f.Fact) ||
			completed && s.index.kinds[f.File] == evidence.TrainerLog && isSlurmWarning(f.Fact)
		failed[f.File] = failed[f.File] || !recovered[i] && mannerOf(f.Fact) < taken
		another[key] = another[key] || !recovered[i] && mannerOf(f.Fact) <= raised
		switch fact := f.Fact.(type) {
		case evidence.Started:
			restarted[f.File] = restarted[f.File] || failed[f.File]
			begun[f.File] = begun[f.File] || closed[f.File]
		case evidence.Progress:
			restarted[f.File] = restarted[f.File] || failed[f.File] && fact.Begins
			begun[f.File] = begun[f.File] || closed[f.File] && fact.Begins
			if advances[i] || fact.Metrics {
				later[key]++
				most[job] = max(most[job], later[key])
			}
		case evidence.ProcessEnded:
			end[key] = mannerOfProcess(fact)
			if fact.By == trainer && end[key] == unended {
				end[job] = unended
			}
			closed[f.File] = closed[f.File] || fact.By == trainer && end[key] == unended
			// The exit code of a pipe or of a script is that of its last program.
			masked[key] = fact.By == recorder && later[key] == 0
		case evidence.Restarted:
			restarted[f.File] = true
		case evidence.Handled:
			handled[key] = f.Number
		}
	}
	var kept []evidence.Finding
	for i, f := range s.findings {
		if recovered[i] {
			s.recoveries = append(s.recoveries, f)
		} else {
			kept = append(kept, f)
		}
	}
	s.findings = kept
}

// lastWords is how many lines a shell or another rank may write after a program has died.
const lastWords = 3

// handledDistance is how many lines may stand between an error and the word that it was dealt with.
const handledDistance = 10

// isShellWord reports whether a sentence has an exit code, and no launcher says it. Before a trainer's closing line it
// is of a program that the trainer has started.
func isShellWord(fact evidence.Fact) bool {
	end, ok := fact.(evidence.ProcessEnded)
	return ok && end.By == "shell" && mannerOfProcess(end) == exited
}

// isSlurmWarning reports whether Slurm says only that a limit was reached at some point, which the page cache is enough
// for. It then names no step.
func isSlurmWarning(fact evidence.Fact) bool {
	kill, ok := fact.(evidence.BatchKill)
	return ok && kill.By == "Slurm" && kill.What == ""
}

// enoughSteps is after how many later steps an error counts as handled. Other ranks may print a step more before they
// notice that one has ended. A batch system may be slower.
func enoughSteps(fact evidence.Fact) int {
	if _, batch := fact.(evidence.BatchKill); batch {
		return 10
	}
	return 2
}

// mayRecover reports whether a program can go on after what a finding says. In the log of a trainer the words of a
// batch system may be a part of a message.
func (s *scene) mayRecover(f evidence.Finding) bool {
	if s.index.kinds[f.File] != evidence.TrainerLog {
		return false
	}
	if _, batch := f.Fact.(evidence.BatchKill); batch {
		return true
	}
	how := mannerOf(f.Fact)
	if exception, ok := f.Fact.(evidence.Exception); ok && how == taken { // a server that could not be reached, say
		return connectionLost.MatchString(exception.Type)
	}
	return how <= raised && how != killed
}

// connectionLost are exceptions of a connection: most programs try again, or do without.
var connectionLost = lazyregexp.New(`Connect|BrokenPipe|EOFError|Disconnected`)

// nameWitness gives the first end a rank where its own lines name none, but a launcher names one rank that has failed
// by itself.
func (s *scene) nameWitness() {
	w := s.witness
	if w == nil || w.rank != evidence.NoRank {
		return
	}
	same := func(v *death) bool { return v.first }
	if !slices.ContainsFunc(s.victims, same) {
		same = func(v *death) bool {
			return v.how == exited || v.how == w.how || len(s.victims) == 1 && (!waited(v) || ownCall(v))
		}
	}
	if i := slices.IndexFunc(s.victims, same); i >= 0 {
		w.rank, w.says = s.victims[i].rank, append(w.says, s.victims[i].says...)
		s.victims = slices.Delete(s.victims, i, i+1)
		return
	}
}

// ownCall reports whether a collective failed for a call to the system of the rank itself, and not for a peer.
func ownCall(v *death) bool {
	return slices.ContainsFunc(all[evidence.CollectiveFailed](v.says), func(f seen[evidence.CollectiveFailed]) bool {
		return strings.Contains(f.fact.What, "unhandled system error") || f.fact.What == "ncclSystemError"
	})
}

// waited reports whether a rank waited for another one: it is not the one that was waited for.
func waited(v *death) bool {
	return slices.ContainsFunc(v.says, func(f evidence.Finding) bool {
		_, collective := f.Fact.(evidence.CollectiveFailed)
		return collective
	})
}

// sameKills is the time within which kills of the kernel belong to one event.
const sameKills = 10 * time.Minute

// linkedKills returns the kills of the kernel that concern the job, the first one first. Kernel logs also have kills
// of other days, and of other people's processes.
func (s *scene) linkedKills() []evidence.Finding {
	kills := all[evidence.KernelKill](s.findings)
	if len(kills) == 0 {
		return nil
	}
	var pids []int
	wanted := map[int]bool{}
	if s.witness != nil {
		pids = processes(s.witness.says) // also those that the witness got with its name
	}
	for _, pid := range pids {
		wanted[pid] = true
	}
	var linked, near []evidence.Finding
	for _, k := range kills {
		if wanted[k.fact.PID] || s.ofWitness(k.Finding) {
			linked = append(linked, k.Finding)
		}
		if !s.mayBeOurs(k.fact.Name, pids, s.witness != nil) {
			continue
		}
		if n := len(near); n > 0 && apart(near[n-1], k.Finding) > sameKills {
			near = nil
		}
		near = append(near, k.Finding)
	}
	switch {
	case len(linked) > 0:
		return linked
	case s.witness == nil || s.witness.how == killed || s.witness.how == exited:
		return near
	case s.witness.how == raised: // perhaps because the kernel had killed another process of the job
		return slices.DeleteFunc(near, func(k evidence.Finding) bool {
			kill, _ := k.Fact.(evidence.KernelKill)
			known := !k.Time.IsZero() && !s.witness.says[0].Time.IsZero()
			return kill.PID > 0 && !trainerNames.MatchString(kill.Name) ||
				known && apart(k, s.witness.says[0]).Abs() > sameKills
		})
	}
	return nil
}

// ofWitness reports whether a kill is of the rank that ended first, and of no process that an exception of this rank
// tells about.
func (s *scene) ofWitness(kill evidence.Finding) bool {
	return s.witness != nil && s.witness.how != raised && s.witness.how != lacked &&
		kill.Rank != evidence.NoRank && kill.Rank == s.witness.rank
}

// trainerNames are how the processes of a training are called.
var trainerNames = lazyregexp.New(`(?i)^(python|pt_|torchrun|deepspeed|accelerate|ray|vllm|plimsoll)|train`)

// mayBeOurs reports whether a process of which the kernel speaks may be of the job, of which other lines say that it
// has failed, or nothing. A process in a container has another PID in the kernel's log, so that the name tells where
// the PID does not.
func (s *scene) mayBeOurs(name string, pids []int, failed bool) bool {
	if trainerNames.MatchString(name) {
		return failed || !s.index.endedWell
	}
	return len(pids) == 0 && (failed || !s.index.trainerLog)
}

// killBesideCrash returns a kill of the kernel that may be of another process of the job than the one that has crashed,
// or nil.
func (s *scene) killBesideCrash() *evidence.Finding {
	if s.witness == nil || s.witness.how != crashed || len(s.kills) > 0 {
		return nil
	}
	for _, k := range all[evidence.KernelKill](s.findings) {
		if s.mayBeOurs(k.fact.Name, s.witness.pids, true) {
			return &k.Finding
		}
	}
	return nil
}

// gotSIGBUS reports whether a process of which the kernel says that its memory has failed may be the first that ended.
func (s *scene) gotSIGBUS(f evidence.HardwareFailed) bool {
	if s.witness == nil {
		return s.mayBeOurs(f.Name, nil, false)
	}
	pids := s.witness.pids
	return slices.Contains(pids, f.PID) ||
		(s.witness.how == faulted || s.witness.how == exited) && s.mayBeOurs(f.Name, pids, true)
}

// apart is the time between two findings, or 0 if unknown.
func apart(a, b evidence.Finding) time.Duration {
	if !a.Time.IsZero() && !b.Time.IsZero() {
		return b.Time.Sub(a.Time)
	}
	return b.Uptime - a.Uptime
}
