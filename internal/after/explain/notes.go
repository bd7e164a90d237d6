package explain

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	"plimsoll/internal/after/evidence"
	"plimsoll/internal/base/lazyregexp"
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
	for _, note := range []string{s.planNote, s.division} {
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
	if more := len(list) - mostNamed; more > 0 {
		list = append(list[:mostNamed], "Not read to the end: "+counted(int64(more), "more file")+".")
	}
	return list
}

// smallJump is below what an explanation names as a jump.
const smallJump = 512 * ledger.MiB

// jumps returns where memory rose between two lines of a framework, with the bytes a parameter.
func (s *scene) jumps() []string {
	type stream struct {
		file string
		rank int
		by   string
	}
	last := map[stream]seen[evidence.MemoryUsage]{}
	var list []string
	for _, now := range all[evidence.MemoryUsage](s.findings) {
		key := stream{now.File, now.Rank, now.fact.By}
		was, ok := last[key]
		last[key] = now
		if !ok {
			continue
		}
		for _, place := range []struct {
			name     string
			from, to evidence.Size
			kind     ledger.Kind
		}{
			{"GPU memory", was.fact.Allocated, now.fact.Allocated, ledger.GPU},
			{"host memory of the node", was.fact.HostUsed, now.fact.HostUsed, ledger.Host},
		} {
			if rise := place.to.Bytes - place.from.Bytes; place.from.Known && place.to.Known && rise >= smallJump {
				list = append(list, s.jump(was, now, place.name, place.kind, rise))
			}
		}
	}
	return list[:min(len(list), 12)]
}

// jump describes one rise.
func (s *scene) jump(was, now seen[evidence.MemoryUsage], name string, kind ledger.Kind, rise ledger.Bytes) string {
	text := fmt.Sprintf("%s:%d: %s rose by %v between %q and %q", now.File, now.Number, name, rise, was.fact.Tag,
		now.fact.Tag)
	elements := s.parameters()
	if elements == 0 {
		return text + "."
	}
	each := float64(rise) / float64(elements)
	text += fmt.Sprintf(": %.2f bytes a parameter.", each)
	for _, k := range knownJumps {
		if k.kind == kind && math.Abs(each-k.bytes) < k.bytes/20 && k.tag.MatchString(now.fact.Tag) {
			return text + " " + k.text
		}
	}
	return text
}

// knownJumps are rises of memory whose cause is known, or which are known to be disputed. They come from DeepSpeed's
// source and from its issue 7693. The first that matches counts.
var knownJumps = []struct {
	tag   *lazyregexp.Regexp
	kind  ledger.Kind
	bytes float64 // a parameter
	text  string
}{
	{lazyregexp.New(`(?i)(to|\.)\(?["']?cuda|to gpu|to device`), ledger.GPU, 4,
		"It is the fp32 gradient, copied to the GPU."},
	{lazyregexp.New(`(?i)\bcpu\b`), ledger.Host, 4,
		"It is a second copy of the fp32 gradient: grad = grad.cpu() gives a new tensor the name, while the " +
			"optimizer's partition still holds the first one. So this line measures itself, and shows no leak."},
	{lazyregexp.New(`(?i)unscale|mul_|clip`), ledger.Host, 4,
		"DeepSpeed's source allocates nothing there, and the plan says 0. see_memory_usage counts the whole node: " +
			"states that other ranks make at the same time (8 bytes a parameter) count, too. Others did not " +
			"reproduce this " +
			"rise."},
	{lazyregexp.New(`(?i)adam_update`), ledger.Host, 4,
		"DeepSpeed's source allocates nothing there beyond the optimizer states, and the plan says 0. Others did not " +
			"reproduce this rise; aarch64 builds of PyTorch from 2.10 on keep freed pages (mimalloc)."},
	{lazyregexp.New(`(?i)optimizer|step|adam`), ledger.Host, 8,
		"They are exp_avg and exp_avg_sq in fp32, which the first step makes."},
	{lazyregexp.New(`(?i)fp32 partitions|master`), ledger.Host, 4, "They are the fp32 master weights."},
	{lazyregexp.New(`.`), ledger.Host, 4,
		"Four bytes are one fp32 copy of the parameters: master weights, gradients or one of Adam's two moments."},
	{lazyregexp.New(`.`), ledger.Host, 2, "Two bytes are one 16-bit copy of the parameters."},
	{lazyregexp.New(`.`), ledger.GPU, 4, "Four bytes are one fp32 copy of the parameters."},
	{lazyregexp.New(`.`), ledger.GPU, 2, "Two bytes are one 16-bit copy of the parameters."},
}

// parameters returns the number of trained parameters, or 0.
func (s *scene) parameters() int64 {
	if s.Parameters > 0 {
		return s.Parameters
	}
	for _, p := range s.Plans {
		return p.Parameters
	}
	if p, _ := s.planned(); p != nil {
		return p.Trained
	}
	return 0
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
