package explain

import (
	"fmt"
	"math"

	"plimsoll/internal/after/evidence"
	"plimsoll/internal/base/lazyregexp"
	"plimsoll/internal/base/ledger"
)

// smallJump is below what an explanation names as a jump.
const smallJump = 512 * ledger.MiB

// rise is how much more memory a framework shows in one line than in the line before.
type rise struct {
	was, now seen[evidence.MemoryUsage]
	name     string // of the memory
	kind     ledger.Kind
	bytes    ledger.Bytes
}

// mostJumps is how many jumps an explanation names.
const mostJumps = 12

// jumps returns where memory rose between two lines of a framework, with the bytes a parameter or an element.
func (s *scene) jumps() []string {
	rises := s.rises()
	rises = rises[:min(len(rises), mostJumps)]
	elements, unit := s.parameters(), "a parameter"
	if trained := all[evidence.TrainedParameters](s.findings); elements == 0 && len(trained) > 0 {
		elements = trained[0].fact.Number
	}
	if elements == 0 {
		elements, unit = elementsOf(rises), "an element of what was touched"
	}
	var list []string
	for _, r := range rises {
		list = append(list, r.text(elements, unit))
	}
	return list
}

// rises returns the jumps in the order of the lines.
func (s *scene) rises() (list []rise) {
	type stream struct {
		file string
		rank int
		by   string
	}
	last := map[stream]seen[evidence.MemoryUsage]{}
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
			if more := place.to.Bytes - place.from.Bytes; place.from.Known && place.to.Known && more >= smallJump {
				list = append(list, rise{was, now, place.name, place.kind, more})
			}
		}
	}
	return list
}

// text describes the rise. The elements are 0 if nothing tells how many were touched.
func (r rise) text(elements int64, unit string) string {
	text := fmt.Sprintf("%s:%d: %s rose by %v between %q and %q", r.now.File, r.now.Number, r.name, r.bytes,
		r.was.fact.Tag, r.now.fact.Tag)
	if elements == 0 {
		return text + "."
	}
	text += fmt.Sprintf(": %.2f bytes %s.", float64(r.bytes)/float64(elements), unit)
	if known := r.known(elements); known != nil {
		return text + " " + known.text
	}
	return text
}

// known returns what is known of a rise, or nil.
func (r rise) known(elements int64) *knownJump {
	each := float64(r.bytes) / float64(elements)
	for i := range knownJumps {
		if k := &knownJumps[i]; k.names(r) && math.Abs(each-k.bytes) < k.bytes/20 {
			return k
		}
	}
	return nil
}

// elementsOf returns how many elements were touched, where no file says it: the number by which most of the rises are
// known, if the line of one of them names its operation. It is 0 if no line does.
func elementsOf(rises []rise) int64 {
	var elements int64
	most := 0
	for _, r := range rises {
		for i := range knownJumps {
			k := &knownJumps[i]
			if k.tag == nil || !k.names(r) {
				continue
			}
			candidate, explained := int64(float64(r.bytes)/k.bytes), 0
			for _, other := range rises {
				if other.known(candidate) != nil {
					explained++
				}
			}
			if explained > most {
				elements, most = candidate, explained
			}
		}
	}
	return elements
}

// names reports whether the line of a rise names the operation.
func (k *knownJump) names(r rise) bool {
	return k.kind == r.kind && (k.tag == nil || k.tag.MatchString(r.now.fact.Tag))
}

// knownJump is a rise of memory whose cause is known.
type knownJump struct {
	tag   *lazyregexp.Regexp // of the line; nil for any
	kind  ledger.Kind
	bytes float64 // a parameter
	text  string
}

// knownJumps are rises of memory whose cause is known, or which are known to be disputed. They come from DeepSpeed's
// source and from its issue 7693. The first that matches counts.
var knownJumps = []knownJump{
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
	{nil, ledger.Host, 4,
		"Four bytes are one fp32 copy of the parameters: master weights, gradients or one of Adam's two moments."},
	{nil, ledger.Host, 2, "Two bytes are one 16-bit copy of the parameters."},
	{nil, ledger.GPU, 4, "Four bytes are one fp32 copy of the parameters."},
	{nil, ledger.GPU, 2, "Two bytes are one 16-bit copy of the parameters."},
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
