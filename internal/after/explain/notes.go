package explain

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"plimsoll/internal/after/evidence"
	"plimsoll/internal/base/ledger"
)

// notes returns what the files say beside the failure.
func (s *scene) notes() []string {
	list := s.missing()
	if n := len(s.recoveries); n > 0 {
		f := s.recoveries[0]
		list = append(list, fmt.Sprintf("%s:%d: %s, and the program went on (%s of this kind).", f.File, f.Number,
			f.Fact.Says(), counted(int64(n), "error")))
	}
	for _, r := range s.Recordings {
		if r.isPipe() {
			list = append(list, r.Name+": the command is a pipe, and its exit code is that of its last "+
				"program. Nothing "+
				"shows how the others ended: begin the command with \"set -o pipefail;\".")
		}
	}
	for _, note := range []string{s.planNote, s.division, s.lines()} {
		if note != "" {
			list = append(list, note)
		}
	}
	list = append(list, s.jumps()...)
	list = append(list, s.peakAndEnd()...)
	if n := len(all[evidence.AllocationRetried](s.findings)); n > 0 {
		list = append(list, fmt.Sprintf("PyTorch's allocator failed %s and freed its cache to try again: GPU memory "+
			"was nearly full, and no such warning is an error by itself.", counted(int64(n), "time")))
	}
	if flushes := all[evidence.CacheFlushed](s.findings); len(flushes) > 0 {
		list = append(list, "DeepSpeed says that the allocator has flushed its cache: GPU memory is nearly full, "+
			"and every flush stops the GPU.")
	}
	return list
}

// mostLines is how many lines of the source a note names.
const mostLines = 3

// lines says which lines of the source held most of the GPU that ran out, as a snapshot tells.
func (s *scene) lines() string {
	if s.shot == nil || len(s.shot.Lines) == 0 {
		return ""
	}
	var parts []string
	for _, line := range s.shot.Lines[:min(len(s.shot.Lines), mostLines)] {
		parts = append(parts, fmt.Sprintf("%v by %s", line.Bytes, line.Place))
	}
	return fmt.Sprintf("The snapshot %s has the lines of the program that held most: %s. "+
		"plimsoll explain %s shows all.", s.shot.File, strings.Join(parts, "; "), s.shot.File)
}

// mostNamed is how many files notes name one by one.
const mostNamed = 8

// missing returns what was not read of the files.
func (s *scene) missing() []string {
	var list []string
	for _, name := range s.Cut {
		list = append(list, name+": the archive is damaged or cut. The rest of its files is missing.")
	}
	for _, source := range s.Sources {
		if source.Cut {
			list = append(list, source.Name+": the file is damaged or cut, or has more findings than are kept. "+
				"What follows is missing.")
		}
	}
	for _, file := range s.Unread {
		list = append(list, fmt.Sprintf("%s: left out, as it is inside an archive (%s). Unpack it and name it.",
			file.Name, file.Kind))
	}
	for _, file := range s.LeftOut {
		list = append(list, fmt.Sprintf("%s: left out, as explain does not read it (%s).", file.Name, file.Kind))
	}
	if more := len(list) - mostNamed; more > 0 {
		list = append(list[:mostNamed], "Not read to the end: "+counted(int64(more), "more file")+".")
	}
	return list
}

// peakAndEnd says what a GPU held at its peak and no longer at the end, by the user's two numbers.
func (s *scene) peakAndEnd() []string {
	if s.Peak <= s.End || s.End == 0 {
		return nil
	}
	rise := s.Peak - s.End
	device := s.plannedGPU()
	if device == nil {
		return []string{fmt.Sprintf("The peak is %v above the end. The plan of the job would name these bytes: give "+
			"--model and how it is trained, or a plan document.", rise)}
	}
	peak := device.Peak()
	passing := passingAt(peak, device, rise/50)
	if len(passing) == 0 {
		return []string{fmt.Sprintf("The peak is %v above the end. The plan of the job frees nothing in between.",
			rise)}
	}
	var names []string
	for _, h := range passing {
		names = append(names, fmt.Sprintf("%v of %s (%s)", h.Bytes, h.Component.Title(), h.Why))
	}
	return []string{fmt.Sprintf("The peak is %v above the end. The plan of the job has its peak in the %s %s. It "+
		"holds there, and no longer at the end of the step: %s.", rise, peak.Iteration, peak.Name, strings.Join(names,
		"; "))}
}

// passingAt returns what a device holds at a peak and no longer at the end of a steady step, the largest first.
// Components of less than least bytes are left out.
func passingAt(peak *ledger.Phase, device *ledger.Device, least ledger.Bytes) []ledger.Holding {
	end := map[string]ledger.Bytes{}
	for _, p := range device.Phases {
		if p.Name == ledger.Step && p.Iteration == ledger.Steady {
			for _, h := range p.End {
				end[string(h.Component)+" "+h.Part] += h.Bytes
			}
		}
	}
	var passing []ledger.Holding
	for _, h := range peak.Components {
		if h.Bytes -= end[string(h.Component)+" "+h.Part]; h.Bytes >= max(least, 1) {
			passing = append(passing, h)
		}
	}
	slices.SortStableFunc(passing, func(a, b ledger.Holding) int { return cmp.Compare(b.Bytes, a.Bytes) })
	return passing
}

// summaryOfPeak says in a few words what the bytes between peak and end are.
func (s *scene) summaryOfPeak() string {
	text := fmt.Sprintf("The peak of %v is %v above the end", s.Peak, s.Peak-s.End)
	device := s.plannedGPU()
	if device == nil {
		return text
	}
	for _, h := range passingAt(device.Peak(), device, (s.Peak-s.End)/50) {
		return fmt.Sprintf("%s: %v of it are %s", text, h.Bytes, h.Component.Title())
	}
	return text
}

// plannedGPU returns the GPU of the user's plan or job, or nil. Only a plan that was made here knows what the end of a
// phase holds.
func (s *scene) plannedGPU() *ledger.Device {
	p, _ := s.planned()
	if p == nil {
		return nil
	}
	for i := range p.Devices {
		if p.Devices[i].Kind == ledger.GPU {
			return &p.Devices[i]
		}
	}
	return nil
}
