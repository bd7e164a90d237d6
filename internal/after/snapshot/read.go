package snapshot

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"io"
	"math"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files"
	"plimsoll/internal/base/pickle"
)

// headSize is how many bytes tell whether a file is a snapshot.
const headSize = 64 << 10

// Recognize reports whether a file is a snapshot by its first bytes. The file may be compressed with gzip.
func Recognize(head []byte) bool {
	if unzipped, err := gzip.NewReader(bytes.NewReader(head)); err == nil {
		head, _ = io.ReadAll(io.LimitReader(unzipped, headSize)) // it ends early, as the head does
	}
	head = head[:min(len(head), headSize)]
	if len(head) < 3 || head[0] != pickle.OpProto || head[1] < 2 || head[1] > 5 {
		return false
	}
	for _, key := range []uint32{keySegments, keyDeviceTraces, keyTotalSize} {
		if bytes.Contains(head, []byte(keyNames[key])) {
			return true
		}
	}
	return false
}

// Open reads a file. Errors are of type *fault.Input.
func Open(path string) (*Snapshot, error) { return OpenParts(path) }

// OpenParts reads the files of one history in order: PyTorch has cleared its trace after each. The last has the
// segments.
func OpenParts(paths ...string) (*Snapshot, error) {
	all := newRecords()
	var parts []*Snapshot
	for _, path := range paths {
		file, info, err := files.Open(path)
		if err != nil {
			return nil, &fault.Input{Err: err}
		}
		part, err := all.read(path, file, info.Size())
		file.Close()
		if err != nil {
			return nil, err
		}
		parts = append(parts, part)
	}
	return joined(parts), nil
}

// joined returns the last of the parts, with the entries of all. Those of a device follow each other in its trace.
func joined(parts []*Snapshot) *Snapshot {
	s := parts[len(parts)-1]
	if len(parts) == 1 {
		return s
	}
	unlimited, events := &budget{math.MaxInt64}, table[Event]{}
	traces := make([]rows, len(s.traces))
	for device := range traces {
		traces[device].first = uint32(events.length)
		for _, part := range parts {
			if device >= len(part.traces) {
				continue
			}
			for n := part.traces[device].first; n < part.traces[device].last; n++ {
				events.add(unlimited, *s.events.at(n))
			}
		}
		traces[device].last = uint32(events.length)
	}
	s.traces, s.events = traces, events
	return s
}

// Read reads a file of that many bytes, which may be compressed with gzip. The name is for messages.
func Read(name string, file io.Reader, size int64) (*Snapshot, error) {
	return newRecords().read(name, file, size)
}

// read adds the records of a file.
func (all *records) read(name string, file io.Reader, size int64) (s *Snapshot, err error) {
	buffered := bufio.NewReader(file)
	source := io.Reader(buffered)
	if magic, _ := buffered.Peek(2); string(magic) == "\x1f\x8b" {
		unzipped, err := gzip.NewReader(buffered)
		if err != nil {
			return nil, &fault.Input{Where: fault.File(name), Err: err}
		}
		source = unzipped
	}
	d := &decoder{input: newInput(source), budget: &budget{baseBudget + size}, records: all}
	defer func() {
		switch r := recover().(type) {
		case nil:
		case *refusal:
			r.offset = max(r.offset, d.at)
			s, err = nil, r.in(name)
		default:
			panic(r)
		}
	}()
	return d.snapshot(d.run()), nil
}

// snapshot makes a Snapshot of the object of the pickle. PyTorch 1.12 wrote the list of segments alone.
func (d *decoder) snapshot(v value) *Snapshot {
	var top root
	switch {
	case v.kind == theRoot:
		top = *d.roots.at(uint32(v.n))
	case v.kind == rowsList && v.role == segmentRole:
		top.segments = *d.ranges.at(uint32(v.n))
	default:
		d.fail("the pickle holds %v, expected a dictionary with segments and device_traces", v.kind)
	}
	s := &Snapshot{records: d.records, Settings: top.settings, OtherActions: d.others}
	used := uint32(0) // every block and event belongs to one list
	for n := top.segments.first; n < top.segments.last; n++ {
		g := *d.records.segments.at(n)
		d.inOrder(&used, g.blocks, blockRole)
		s.segments = append(s.segments, g)
	}
	used = 0
	for _, n := range top.traces {
		var trace rows
		if n != noRows {
			trace = *d.ranges.at(n)
			d.inOrder(&used, trace, eventRole)
		}
		s.traces = append(s.traces, trace)
	}
	for n := top.annotations.first; n < top.annotations.last; n++ {
		s.Annotations = append(s.Annotations, *d.annotations.at(n))
	}
	return s
}

func (d *decoder) inOrder(used *uint32, r rows, of role) {
	if r.first < r.last && r.first < *used {
		d.fail("two lists share %s", roleNames[of])
	}
	*used = max(*used, r.last)
}
