package snapshot

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"io"

	"plimsoll/fault"
	"plimsoll/files"
)

// headSize is how many bytes tell whether a file is a snapshot.
const headSize = 64 << 10

// Recognize reports whether a file is a snapshot by its first bytes. The file may be compressed with gzip.
func Recognize(head []byte) bool {
	if unzipped, err := gzip.NewReader(bytes.NewReader(head)); err == nil {
		head, _ = io.ReadAll(io.LimitReader(unzipped, headSize)) // it ends early, as the head does
	}
	head = head[:min(len(head), headSize)]
	if len(head) < 3 || head[0] != opProto || head[1] < 2 || head[1] > 5 {
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
func Open(path string) (*Snapshot, error) {
	file, info, err := files.Open(path)
	if err != nil {
		return nil, &fault.Input{Err: err}
	}
	defer file.Close()
	return Read(path, file, info.Size())
}

// Read reads a file of that many bytes, which may be compressed with gzip. The name is for messages.
func Read(name string, file io.Reader, size int64) (s *Snapshot, err error) {
	buffered := bufio.NewReader(file)
	source := io.Reader(buffered)
	if magic, _ := buffered.Peek(2); string(magic) == "\x1f\x8b" {
		unzipped, err := gzip.NewReader(buffered)
		if err != nil {
			return nil, &fault.Input{Where: fault.File(name), Err: err}
		}
		source = unzipped
	}
	d := &decoder{input: newInput(source), budget: &budget{baseBudget + size}, records: newRecords()}
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
