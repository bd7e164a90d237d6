package evidence

// A program in trouble may write one line a million times. What a line says depends on its words. Lines that differ in
// their numbers only have one wording, of which the first lines and the last ones stand for all.

const (
	// dullLines is how many lines of a wording have to say nothing before no more of them are looked at.
	dullLines = 32
	// mostOfWording is how many findings of a wording are kept.
	mostOfWording = 500
	// mostWordings bounds the memory for wordings.
	mostWordings = 1 << 16
	// lastLooks is how many of the lines that were not looked at are looked at in the end.
	lastLooks = 64
)

// wording is a line without its numbers. A number is 0 or another one: "0 errors" is no error.
type wording uint64

// wordingOf returns the wording of a line.
func wordingOf[T string | []byte](line T) wording {
	const offset, prime = 14695981039346656037, 1099511628211
	hash, inside, zero := uint64(offset), false, true
	end := func() {
		mark := byte('1')
		if zero {
			mark = '0'
		}
		hash = (hash ^ uint64(mark)) * prime
		inside, zero = false, true
	}
	for i := range len(line) {
		c := line[i]
		if c >= '0' && c <= '9' || inside && isHex(c) {
			inside, zero = true, zero && c == '0'
			continue
		}
		if inside {
			end()
		}
		hash = (hash ^ uint64(c)) * prime
	}
	if inside {
		end()
	}
	return wording(hash)
}

func isHex(c byte) bool { return c >= 'a' && c <= 'f' || c >= 'A' && c <= 'F' || c == 'x' }

// repeats are the wordings of a file.
type repeats struct {
	dull     map[wording]int // how many lines of a wording have said nothing
	dense    map[wording]int // how many findings of a wording were not kept
	findings map[wording]*repeated
	late     [lastLooks]lateSign // the last lines that were not looked at
	skipped  int                 // lines
	dropped  int                 // findings
}

// repeated are the findings of a wording.
type repeated struct {
	count int
	last  Finding // the last one that was not kept
}

// skips reports whether a line is like many others that have said nothing. It keeps the last ones of them.
func (r *repeats) skips(s wording, line []byte, number, step int) bool {
	if r.dull[s] < dullLines && r.dense[s] < dullLines {
		return false
	}
	l := &r.late[r.skipped%lastLooks]
	r.skipped++
	l.line = append(l.line[:0], line[:min(len(line), longestShown)]...)
	l.number, l.step = number, step
	return true
}

// saysNothing counts a line that has said nothing.
func (r *repeats) saysNothing(s wording) {
	count(&r.dull, s)
}

// saysTheSame counts a line whose findings were not kept.
func (r *repeats) saysTheSame(s wording) { count(&r.dense, s) }

func count(in *map[wording]int, s wording) {
	if *in == nil {
		*in = map[wording]int{}
	}
	if len(*in) < mostWordings || (*in)[s] > 0 {
		(*in)[s]++
	}
}

// metrics counts lines of metrics since another finding. They say only that training has gone on after it.
type metrics int

// mostMetrics is enough for some lines of each rank of a node, one after the other.
const mostMetrics = 512

// keeps reports whether a fact is kept.
func (n *metrics) keeps(fact Fact) bool {
	if p, ok := fact.(Progress); !ok || !p.Metrics {
		*n = 0
		return true
	}
	*n++
	return *n <= mostMetrics
}

// keeps reports whether a finding is kept. Of the others of its wording the last one is remembered.
func (r *repeats) keeps(f *Finding, text string) bool {
	switch f.Fact.(type) {
	case Progress, MemoryUsage, Counters, Started, Restarted:
		return true // each of them counts
	}
	if r.findings == nil {
		r.findings = map[wording]*repeated{}
	}
	s := wordingOf(text)
	same := r.findings[s]
	if same == nil {
		if len(r.findings) >= mostWordings {
			return true
		}
		same = &repeated{}
		r.findings[s] = same
	}
	if same.count++; same.count <= mostOfWording {
		return true
	}
	same.last = *f
	r.dropped++
	return false
}

// rest returns the last finding of each wording of which not all are kept.
func (r *repeats) rest() (list []Finding) {
	for _, same := range r.findings {
		if same.last.Fact != nil {
			list = append(list, same.last)
		}
	}
	return list
}

// lookAgain looks at the last lines that were not looked at.
func (r *reader) lookAgain() {
	late := &r.repeats
	step := r.signs.step
	for i := range late.late {
		l := &late.late[(late.skipped+i)%lastLooks]
		if l.number == 0 || step-l.step >= stepsAfter {
			continue
		}
		r.signs.step = l.step
		r.index.find(l.line, &r.hits)
		t := clean(string(l.line), l.number)
		if r.repeats.dense[wordingOf(l.line)] > 0 {
			r.text(&t)
		} else {
			r.notice(r.stream(t.stream), &t, false)
		}
	}
	r.signs.step = step
}
