//go:build linux

package watch

import (
	"bytes"
	"slices"
	"strings"
	"time"

	"plimsoll/internal/base/samples"
)

// A recording takes the lines of a rank as they come, within a budget. A rank that prints more has its last lines in
// the recording, and before them lines that mean something.
const (
	outputBurst  = 64 << 10  // bytes that a rank may print at once
	outputRate   = 4 << 10   // bytes that a rank may print in a second, on average
	notedBurst   = 1 << 20   // bytes of lines that mean something, beyond these
	keptOutput   = 64 << 10  // bytes of each rank that are kept in memory: the last ones
	notedOutput  = 64 << 10  // bytes of lines that mean something and are older
	longestLine  = 4 << 10   // bytes of a line that are kept
	longestState = 256 << 10 // bytes after which text without an end becomes a line
)

// line is one line that a rank has printed.
type line struct {
	time    time.Duration
	stream  string
	text    string
	skipped int64 // lines before it that are in no record
	means   bool  // it means something to package evidence
	written bool  // to the file
}

// output is what a rank has printed.
type output struct {
	rank    int
	streams map[string]*stream
	budget  int64 // bytes that may be written
	filled  time.Duration
	last    []line // the last ones
	bytes   int    // of last
	noted   []line // older ones that mean something: the first ones
	noting  int    // bytes of noted
	lost    int64  // lines that are in no record, since the last one that is
}

// stream is the end of a stream that is no line yet.
type stream struct {
	rest []byte
	// bar is a line that the rank has ended with a carriage return. A terminal writes the next one over it.
	bar string
}

func newOutput(rank int) *output {
	return &output{rank: rank, streams: map[string]*stream{}, budget: outputBurst}
}

// print takes text. It passes the lines of the text, the states of progress bars included, to read. That returns which
// of them mean something.
func (o *output) print(now time.Duration, name string, skipped int64, text []byte, read func(lines []string) []bool) {
	s := o.streams[name]
	if s == nil {
		s = &stream{}
		o.streams[name] = s
	}
	if skipped > 0 {
		o.lost++ // at least one line
		for _, of := range o.streams {
			of.rest, of.bar = nil, ""
		}
	}
	states, ended := s.split(text)
	means := read(states)
	for i, state := range states {
		if ended[i] {
			o.add(line{time: now, stream: name, text: state, means: means[i]})
		}
	}
}

// split returns the lines that end in the text. Those that end with a carriage return are not ended: the next one
// takes their place.
func (s *stream) split(text []byte) (states []string, ended []bool) {
	rest := append(s.rest, text...)
	for {
		end := bytes.IndexAny(rest, "\n\r")
		if end < 0 {
			break
		}
		state, newline := clean(rest[:end]), rest[end] == '\n'
		rest = rest[end+1:]
		if state == "" && newline {
			state = s.bar // its end is "\r\n", or a newline ends a progress bar
		}
		if state == "" && !newline {
			continue
		}
		if s.bar = state; newline {
			s.bar = ""
		}
		states, ended = append(states, state), append(ended, newline)
	}
	if len(rest) > longestState {
		states, ended = append(states, clean(rest)), append(ended, true)
		rest = nil
	}
	s.rest = slices.Clone(rest)
	return states, ended
}

// clean returns a line as text that JSON can hold.
func clean(text []byte) string {
	return strings.ToValidUTF8(string(text[:min(len(text), longestLine)]), "\uFFFD")
}

// finish makes lines of what the streams end with.
func (o *output) finish(now time.Duration) {
	for _, name := range []string{"stdout", "stderr"} {
		s := o.streams[name]
		if s == nil {
			continue
		}
		if len(s.rest) > 0 {
			s.bar = clean(s.rest)
		}
		if s.bar != "" {
			o.add(line{time: now, stream: name, text: s.bar})
		}
		s.rest, s.bar = nil, ""
	}
}

func (o *output) add(l line) {
	o.last = append(o.last, l)
	o.bytes += len(l.text) + 1
	for o.bytes > keptOutput {
		o.forget()
	}
}

// forget takes the oldest line out of the last ones.
func (o *output) forget() {
	l := o.last[0]
	o.last = o.last[1:]
	o.bytes -= len(l.text) + 1
	if l.means && o.noting+len(l.text) < notedOutput {
		o.noted = append(o.noted, l)
		o.noting += len(l.text) + 1
	} else if !l.written {
		o.lost++
	}
}

// take returns records of the lines that are not written yet, and that the budget allows. At the end of the rank it
// returns all of them.
func (o *output) take(now time.Duration, ended bool) []samples.Record {
	if ended {
		o.finish(now)
	}
	o.budget = min(outputBurst, o.budget+int64((now-o.filled).Seconds()*outputRate))
	o.filled = now
	var taken []line
	for i := range o.last {
		l := &o.last[i]
		if allowed := o.budget > 0 || l.means && o.budget > -notedBurst; l.written || !ended && !allowed {
			continue
		}
		o.budget -= int64(len(l.text)) + 1
		l.written, l.skipped, o.lost = true, o.lost, 0
		taken = append(taken, *l)
	}
	return o.records(taken)
}

// recording returns records of the lines in memory.
func (o *output) recording() []samples.Record { return o.records(slices.Concat(o.noted, o.last)) }

// records makes records of lines. Lines of one stream that were printed together are one record.
func (o *output) records(lines []line) []samples.Record {
	var all []samples.Record
	for _, l := range lines {
		if n := len(all); n > 0 && all[n-1].Time == l.time && all[n-1].Output.Stream == l.stream && l.skipped == 0 {
			all[n-1].Output.Lines = append(all[n-1].Output.Lines, l.text)
			continue
		}
		all = append(all, samples.Record{Time: l.time, Output: &samples.Output{Rank: o.rank, Stream: l.stream,
			Lines: []string{l.text}, Skipped: l.skipped}})
	}
	return all
}
