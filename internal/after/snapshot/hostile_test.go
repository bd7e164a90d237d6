package snapshot

import (
	"bytes"
	"compress/gzip"
	"errors"
	"runtime"
	"strings"
	"testing"
	"time"

	"plimsoll/internal/base/fault"
)

func refusedFor(t *testing.T, file, expected string) {
	t.Helper()
	_, err := Read("hostile.pickle", strings.NewReader(file), int64(len(file)))
	var input *fault.Input
	if !errors.As(err, &input) || !strings.Contains(err.Error(), expected) {
		t.Errorf("%.60q: %v, expected an error with %q", file, err, expected)
	}
}

const proto = "\x80\x04"

// entry is an entry of a trace.
const entry = "}(\x8c\x06action\x8c\x05alloc\x8c\x04sizeK\x01u"

// TestSharedList: two objects may share a list that is complete, before anything has taken it up.
func TestSharedList(t *testing.T) {
	file := proto + "](}(\x8c\x06frames]\x94\x8c\x06blocks](}(\x8c\x05state\x8c\x08inactive\x8c\x04sizeK\x07" +
		"\x8c\x06framesh\x00ue\x8c\x0atotal_sizeK\x07ue."
	s, err := Read("shared.pickle", strings.NewReader(file), int64(len(file)))
	if err != nil || len(s.segments) != 1 || s.segments[0].Size != 7 {
		t.Error(s, err)
	}
}

// TestHostileFiles: what would run something, refer to itself, grow without end, or say two things is refused with the
// place.
func TestHostileFiles(t *testing.T) {
	// A file that would run os.system in Python.
	refusedFor(t, proto+"cos\nsystem\n(U\x04exitR.", "byte 2: the instruction GLOBAL, which would run code")
	for op, name := range refused {
		refusedFor(t, proto+"})"+string([]byte{op}), "byte 4: the instruction "+name)
	}
	for _, test := range []struct{ file, expected string }{
		{"", "no pickle of protocol 2 to 5"},
		{"hello", "no pickle of protocol 2 to 5"},
		{"\x80\x01}.", "protocol 1, expected 2 to 5"},
		{"\x80\x06}.", "protocol 6, expected 2 to 5"},
		{proto + ".", "ends with 0 objects"},
		{proto + "}}.", "ends with 2 objects"},
		{proto + "(}.", "ends with 1 objects"},
		{proto + "}.x", "byte 4: byte 0x78 after the end"},
		{proto + "}.\x00\x00", "holds another object"},
		{proto + "].", "holds an empty list"},
		{proto + "e", "an end without its MARK"},
		{proto + "u", "an end without its MARK"},
		{proto + "a", "needs more objects than there are"},
		{proto + "(a", "needs more objects than there are"},
		{proto + "]\x94(h\x00e.", "byte 5: an object that contains itself"},
		{proto + "}\x94(\x8c\x01ah\x00u.", "an object that contains itself"},
		{proto + "h\x00.", "number 0 of the memo, which has 0"},
		{proto + "}q\x05.", "number 5 of the memo, expected 0"},
		{proto + "}r\xff\xff\xff\xff.", "number 4294967295 of the memo, expected 0"},
		{proto + "K\x01\x94.", "the memo gets an integer"},
		{proto + "}\x94\x94.", "one object twice"},
		{proto + "X\xff\xff\xff\xff", "a text of 4294967295 bytes"},
		{proto + "\x8d\xff\xff\xff\xff\xff\xff\xff\xff", "a text of"},
		{proto + "\x8b\xff\xff\xff\x7f", "an integer of 2147483647 bytes"},
		{proto + "\x8a\x09\x01\x01\x01\x01\x01\x01\x01\x01\x01.", "does not fit 64 bits"},
		{proto + "}(K\x01u.", "a key without its value"},
		{proto + "](K\x01K\x02u.", "keys and values for a list"},
		{proto + "}(K\x01e.", "elements for a dictionary"},
		{proto + "\x9c.", "the instruction 0x9c, which no snapshot has"},
		{proto + "}(\x8c\x04sizeK\x01\x8c\x04sizeK\x02u.", "the key \"size\" twice"},
		{proto + "}(\x8c\x08segmentsK\x01u.", "segments: found an integer, expected a list of segments"},
		{proto + "}(\x8c\x06action\x8c\x05alloc\x8c\x04sizeJ\xff\xff\xff\xffu.", "size: found -1, expected a size"},
		{proto + "}(\x8c\x06actionK\x01u.", "action: found an integer, expected a text"},
		{proto + "](]\x94h\x00K\x01a", "elements for an empty list, expected a list that has not been used"},
		{proto + "}(\x8c\x06blocks]\x8c\x0atotal_sizeK\x05u.", "has 5 bytes and its blocks add up to 0"},
		{proto + "}(\x8c\x08segments]\x8c\x0ddevice_traces](]\x94(" + entry + "eh\x00eu.",
			"two lists share entries of a trace"},
	} {
		refusedFor(t, test.file, test.expected)
	}
}

// measured runs a function and returns the memory that it took, and its time.
func measured(f func()) (bytes uint64, elapsed time.Duration) {
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	begin := time.Now()
	f()
	elapsed = time.Since(begin)
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc, elapsed
}

// TestBombs: files whose objects would fill the memory of a reader that builds what they say.
func TestBombs(t *testing.T) {
	const n = 1 << 20
	laughs := "]\x94" // each list holds the last one ten times
	for i := range 40 {
		laughs += "]\x94(" + strings.Repeat("h"+string([]byte{byte(i)}), 10) + "e"
	}
	for name, file := range map[string]string{
		"lists":   proto + strings.Repeat("]", n),
		"dicts":   proto + strings.Repeat("}", n),
		"marks":   proto + strings.Repeat("(", n),
		"nested":  proto + strings.Repeat("](", n),
		"laughs":  proto + laughs,
		"tuples":  proto + strings.Repeat(")", n),
		"memo":    proto + "}" + strings.Repeat("\x94", n),
		"numbers": proto + strings.Repeat("N", n) + ".",
	} {
		t.Run(name, func(t *testing.T) {
			var err error
			used, elapsed := measured(func() { _, err = Read(name, strings.NewReader(file), int64(len(file))) })
			if err == nil || used > 128<<20 || elapsed > time.Minute { // building takes for ever
				t.Errorf("%d MiB in %v, error %v", used>>20, elapsed, err)
			}
		})
	}
	// A small file that unpacks to gigabytes ends at the limit of memory.
	var packed bytes.Buffer
	w := gzip.NewWriter(&packed)
	_, _ = w.Write([]byte(proto))
	nones := bytes.Repeat([]byte("N"), 1<<20)
	for range 64 {
		_, _ = w.Write(nones)
	}
	_ = w.Close()
	_, err := Read("bomb.gz", &packed, int64(packed.Len()))
	if err == nil || !strings.Contains(err.Error(), "takes more memory than 512 MiB") {
		t.Errorf("a bomb: %v", err)
	}
}

// TestCutAnywhere: a file that ends too early is refused wherever it ends.
func TestCutAnywhere(t *testing.T) {
	x := small
	x.Steps, x.Layers = 1, 1
	stride := 1
	if testing.Short() {
		stride = 7 // no multiple of what the file repeats
	}
	for name, style := range styles {
		file, _ := written(t, x, style)
		for end := 0; end < len(file); end += stride {
			if _, err := Read(name, bytes.NewReader(file[:end]), int64(end)); err == nil {
				t.Fatalf("%s cut at %d of %d bytes was read", name, end, len(file))
			}
		}
		padded := append(file, 0, 0, 0) // as torch.cuda._memory_viz does
		if _, err := Read(name, bytes.NewReader(padded), int64(len(padded))); err != nil {
			t.Error(err)
		}
	}
}

// TestMemoryOfALargeFile: a file takes less memory than half its size beside a few megabytes.
func TestMemoryOfALargeFile(t *testing.T) {
	x := small
	x.Layers, x.Steps, x.Frames = 12, 600, 50
	file, totals := written(t, x, styles["protocol 4"])
	var s *Snapshot
	used, elapsed := measured(func() {
		var err error
		if s, err = Read("large", bytes.NewReader(file), int64(len(file))); err != nil {
			t.Fatal(err)
		}
	})
	t.Logf("%d entries, %d MiB in %v with %d MiB", totals.Events, len(file)>>20, elapsed, used>>20)
	if used > uint64(len(file))/2+8<<20 {
		t.Errorf("%d bytes of memory for a file of %d", used, len(file))
	}
	runtime.KeepAlive(s)
}

func FuzzRead(f *testing.F) {
	x := small
	x.Steps, x.Layers, x.Frames = 1, 1, 1
	for _, style := range styles {
		file, _ := written(f, x, style)
		f.Add(file)
	}
	f.Add([]byte(proto + "]\x94(h\x00e."))
	f.Add([]byte("\x80\x02](}(X\x06\x00\x00\x00blocks]X\x0a\x00\x00\x00total_sizeK\x00ue."))
	f.Fuzz(func(t *testing.T, file []byte) {
		s, err := Read("fuzz", bytes.NewReader(file), int64(len(file)))
		Recognize(file)
		if err != nil {
			var input *fault.Input
			if !errors.As(err, &input) {
				t.Fatalf("%T %v", err, err)
			}
			return
		}
		devices, err := s.Devices()
		if err != nil {
			return
		}
		for _, d := range devices {
			d.Holders(d.Peak.Entry)
			d.Failures()
			c, _ := s.Configuration()
			if _, err := d.Replay(c, NoEmptyCache); err != nil {
				t.Fatal(err)
			}
		}
	})
}
