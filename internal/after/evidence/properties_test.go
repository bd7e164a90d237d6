package evidence

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
	"github.com/ulikunitz/xz"
	"golang.org/x/text/encoding/unicode"
	"golang.org/x/text/encoding/unicode/utf32"
	"pgregory.net/rapid"

	"plimsoll/internal/machine/host/hosttest"
)

// compressed returns the text behind a compressing writer.
func compressed(open func(io.Writer) (io.WriteCloser, error)) func([]byte) []byte {
	return func(text []byte) []byte {
		var b bytes.Buffer
		w, err := open(&b)
		if err != nil {
			panic(err)
		}
		if _, err := w.Write(text); err != nil {
			panic(err)
		}
		if err := w.Close(); err != nil {
			panic(err)
		}
		return b.Bytes()
	}
}

// wholes are what may happen to a file as a whole.
var wholes = map[string]func([]byte) []byte{
	"crlf": func(text []byte) []byte { return bytes.ReplaceAll(text, []byte("\n"), []byte("\r\n")) },
	"bom":  func(text []byte) []byte { return append([]byte("\xef\xbb\xbf"), text...) },
	"gzip": compressed(func(w io.Writer) (io.WriteCloser, error) { return gzip.NewWriter(w), nil }),
	// The usual window of 8 MiB would take most of the time of these tests.
	"xz": compressed(func(w io.Writer) (io.WriteCloser, error) {
		return xz.WriterConfig{DictCap: 1 << 16}.NewWriter(w)
	}),
	"zstd": compressed(func(w io.Writer) (io.WriteCloser, error) { return zstd.NewWriter(w) }),
	"utf-16le": func(text []byte) []byte {
		return encoded(unicode.UTF16(unicode.LittleEndian, unicode.UseBOM).NewEncoder().Bytes(text))
	},
	"utf-16be": func(text []byte) []byte {
		return encoded(unicode.UTF16(unicode.BigEndian, unicode.UseBOM).NewEncoder().Bytes(text))
	},
	"utf-16le without mark": func(text []byte) []byte {
		return encoded(unicode.UTF16(unicode.LittleEndian, unicode.IgnoreBOM).NewEncoder().Bytes(text))
	},
	"utf-32le": func(text []byte) []byte {
		return encoded(utf32.UTF32(utf32.LittleEndian, utf32.UseBOM).NewEncoder().Bytes(text))
	},
	"no end of the last line": func(text []byte) []byte { return bytes.TrimSuffix(text, []byte("\n")) },
}

func encoded(text []byte, err error) []byte {
	if err != nil {
		panic(err)
	}
	return text
}

// lineLabels are what launchers, loggers and terminals do to each line. They tell rank 5 or no rank.
var lineLabels = map[string]func(line string) string{
	"torchrun":    func(s string) string { return "[rank5]: " + s },
	"--tee":       func(s string) string { return "[default5]:" + s },
	"lightning":   func(s string) string { return "[rank: 5] " + s },
	"srun":        func(s string) string { return "5: " + s },
	"mpirun":      func(s string) string { return "[1,5]<stderr>:" + s },
	"sagemaker":   func(s string) string { return "[1,mpirank:5,algo-1]<stdout>:" + s },
	"ray":         func(s string) string { return "\x1b[36m(RayTrainWorker pid=77, ip=10.0.0.1)\x1b[0m " + s },
	"kubectl":     func(s string) string { return "[pod/trainer-0/trainer] " + s },
	"compose":     func(s string) string { return "trainer-1  | " + s },
	"pdsh":        func(s string) string { return "worker-0: " + s },
	"docker":      func(s string) string { return "2026-11-23T03:04:05.123456789Z " + s },
	"cri":         func(s string) string { return "2026-11-23T03:04:05.123456789+00:00 stderr F " + s },
	"log4j":       func(s string) string { return "2026-11-23 03:04:05,123 " + s },
	"dmesg":       func(s string) string { return "[  123.456789] " + s },
	"dmesg -T":    func(s string) string { return "[Mon Nov 23 03:04:05 2026] " + s },
	"dmesg -x":    func(s string) string { return "kern  :info  : [  123.456789] " + s },
	"syslog":      func(s string) string { return "Nov 23 03:04:05 node7 kernel: [  123.456789] " + s },
	"journal":     func(s string) string { return "Nov 23 03:04:05 node7 trainer[77]: " + s },
	"journal iso": func(s string) string { return "2026-11-23T03:04:05+0000 node7 kernel: " + s },
	"level":       func(s string) string { return "<4>" + s },
	"caller":      func(s string) string { return "[  123.456789][ T1234] " + s },
	"colour": func(s string) string {
		return "\x1b[1;31m" + strings.ReplaceAll(s, " ", "\x1b[0m \x1b[32m") + "\x1b[0m"
	},
	"two labels": func(s string) string { return "worker-0: 2026-11-23T03:04:05Z [rank5]: " + s },
	"json": func(s string) string {
		text, err := json.Marshal(map[string]any{"log": s + "\n", "stream": "stderr", "time": "2026-11-23T03:04:05Z"})
		if err != nil {
			panic(err)
		}
		return string(text)
	},
	"journal json": func(s string) string {
		text, err := json.Marshal(map[string]any{"MESSAGE": s, "_TRANSPORT": "stdout",
			"__REALTIME_TIMESTAMP": "1795403045000000"})
		if err != nil {
			panic(err)
		}
		return string(text)
	},
}

// labelled returns the text with what happens to each line.
func labelled(text []byte, label func(string) string) []byte {
	var b strings.Builder
	for line := range strings.Lines(string(text)) {
		b.WriteString(label(strings.TrimSuffix(line, "\n")) + "\n")
	}
	return []byte(b.String())
}

// facts are those of a text, without lines and ranks.
func facts(t testing.TB, text []byte) string {
	var b strings.Builder
	for _, f := range readText(t, "log", text).Findings {
		fmt.Fprintf(&b, "%T%+v\n", f.Fact, f.Fact)
	}
	return b.String()
}

// withoutRank leaves out the rank that some facts repeat from the label.
func withoutRank(facts string) string {
	return strings.ReplaceAll(facts, "Rank:5 LocalRank", "Rank:-1 LocalRank")
}

// TestFactsSurviveEncodings: compression, encodings and ends of lines do not change what a file says, nor where.
func TestFactsSurviveEncodings(t *testing.T) {
	for _, f := range examples(t) {
		want := factsOf(readText(t, f.Name, f.Data), true)
		for name, change := range wholes {
			if got := factsOf(readText(t, f.Name, change(f.Data)), true); got != want {
				t.Errorf("%s, %s:\n%swant\n%s", f.Name, name, got, want)
			}
		}
	}
}

// TestFactsSurviveLabels: what stands before each line does not change its facts.
func TestFactsSurviveLabels(t *testing.T) {
	for _, f := range examples(t) {
		want := facts(t, f.Data)
		for name, label := range lineLabels {
			if got := facts(t, labelled(f.Data, label)); withoutRank(got) != withoutRank(want) {
				t.Errorf("%s, %s:\n%swant\n%s", f.Name, name, got, want)
			}
		}
	}
}

// broken returns the line in lines of at most so many bytes: at its spaces, as loggers do, or anywhere, as terminals
// do.
func broken(line string, width int, anywhere bool) string {
	var b strings.Builder
	for len(line) > width {
		at := width
		if space := strings.LastIndexByte(line[:width+1], ' '); !anywhere && space > 0 {
			at = space
		}
		b.WriteString(line[:at] + "\n")
		line = line[at:]
		if !anywhere {
			line = strings.TrimPrefix(line, " ")
		}
	}
	return b.String() + line
}

// TestFactsSurviveBreaks: a long message that is broken into lines says the same.
func TestFactsSurviveBreaks(t *testing.T) {
	for _, f := range examples(t) {
		for _, p := range patternIndex().patterns {
			line := strings.TrimSuffix(string(f.Data), "\n")
			of := f.Name == p.name || strings.HasPrefix(f.Name, p.name+": ")
			if !p.wrapped || !of || strings.Contains(line, "\n") {
				continue
			}
			want := facts(t, f.Data)
			for _, width := range []int{60, 72, 80, 100, 132} {
				for _, anywhere := range []bool{false, true} {
					text := "all is well\n" + broken(line, width, anywhere) + "\nall is well\n"
					if got := facts(t, []byte(text)); got != want {
						t.Errorf("%s, %d columns, %v:\n%swant\n%sin\n%s", f.Name, width, anywhere, got, want, text)
					}
				}
			}
		}
	}
}

// TestJunkBeside: bytes that are no text, and text in Latin-1, change nothing.
func TestJunkBeside(t *testing.T) {
	junk := "caf\xe9 \xff\x00\x01\x1b]0;title\x07\n" + strings.Repeat("\x00", 300) + "\n"
	for _, f := range examples(t) {
		want := facts(t, f.Data)
		if got := facts(t, []byte(junk+string(f.Data)+junk)); got != want {
			t.Errorf("%s:\n%swant\n%s", f.Name, got, want)
		}
	}
}

// TestRankOfLabel: the label of a line tells its rank.
func TestRankOfLabel(t *testing.T) {
	text := []byte("RuntimeError: CUDA error: out of memory\n")
	for _, name := range []string{"torchrun", "--tee", "lightning", "srun", "mpirun", "sagemaker", "two labels"} {
		s := readText(t, name, labelled(text, lineLabels[name]))
		if len(s.Findings) != 1 || s.Findings[0].Rank != 5 || strings.Contains(s.Findings[0].Text, "5") {
			t.Errorf("%s: %+v", name, s.Findings)
		}
	}
}

// TestInterleavedRanks: the lines of two ranks, in any order, tell what each tells alone.
func TestInterleavedRanks(t *testing.T) {
	files := examples(t)
	rapid.Check(t, func(t *rapid.T) {
		a := files[rapid.IntRange(0, len(files)-1).Draw(t, "first")]
		b := files[rapid.IntRange(0, len(files)-1).Draw(t, "second")]
		lines := [2][]string{
			strings.SplitAfter(string(labelled(a.Data, func(s string) string { return "[rank1]: " + s })), "\n"),
			strings.SplitAfter(string(labelled(b.Data, func(s string) string { return "[rank2]: " + s })), "\n"),
		}
		var mixed strings.Builder
		for len(lines[0])+len(lines[1]) > 0 {
			from := rapid.IntRange(0, 1).Draw(t, "from")
			if len(lines[from]) == 0 {
				from = 1 - from
			}
			mixed.WriteString(lines[from][0])
			lines[from] = lines[from][1:]
		}
		s, err := Read("log", strings.NewReader(mixed.String()))
		if err != nil {
			t.Fatal(err)
		}
		for rank, f := range []string{string(a.Data), string(b.Data)} {
			label := fmt.Sprintf("[rank%d]: ", rank+1)
			alone, err := Read("log", bytes.NewReader(labelled([]byte(f), func(s string) string { return label + s })))
			if err != nil {
				t.Fatal(err)
			}
			for _, finding := range alone.Findings {
				finding := fmt.Sprintf("%d%+v", finding.Rank, finding.Fact)
				found := false
				for _, got := range s.Findings {
					found = found || fmt.Sprintf("%d%+v", got.Rank, got.Fact) == finding
				}
				if !found {
					t.Fatalf("%s is missing in:\n%s", finding, mixed.String())
				}
			}
		}
	})
}

// check holds what every reading must hold.
func check(t testing.TB, text []byte) {
	var s *Source
	var err error
	most := 2*time.Second + time.Duration(len(text))*time.Microsecond
	began := hosttest.CPUTime(t)
	s, err = Read("fuzz", bytes.NewReader(text))
	if took := hosttest.CPUTime(t) - began; took > most && float64(took) > float64(most)*hosttest.Slowness(t) {
		t.Errorf("%d bytes took %v of the processor", len(text), took)
	}
	if err != nil {
		return
	}
	last := 0
	for _, f := range s.Findings {
		if f.Number < last || f.Number < 1 || s.Lines > 0 && f.Number > s.Lines {
			t.Errorf("line %d after %d of %d: %+v", f.Number, last, s.Lines, f)
		}
		last = f.Number
		if f.File != "fuzz" || len(f.Text) > 2*longestShown || f.Fact.Says() == "" {
			t.Errorf("%+v", f)
		}
	}
}

// TestLongLog: a log of any length has a limited number of findings, the last progress is among them, and so is what is
// not repetitive.
func TestLongLog(t *testing.T) {
	var b bytes.Buffer
	for i := range maxFindings * 3 / 2 {
		fmt.Fprintf(&b, "[Rank 0] step=%d, skipped=0, lr=[1e-05]\n", i)
	}
	b.WriteString("CUDA error: out of memory\n")
	s := readText(t, "log", b.Bytes())
	last := s.Findings[len(s.Findings)-1]
	if _, ok := last.Fact.(DriverOutOfMemory); !ok || last.Number != s.Lines {
		t.Errorf("the last finding is %+v", last)
	}
	if n := len(s.Findings); n <= maxFindings || n > maxFindings+maxFindings/32 {
		t.Errorf("%d findings", n)
	}
}

// TestHostileLines: lines that are long and full of what patterns begin with do not take long.
func TestHostileLines(t *testing.T) {
	var line strings.Builder
	for _, p := range patternIndex().patterns {
		for _, literal := range p.literals {
			line.WriteString(literal + " ")
		}
	}
	text := strings.Repeat(line.String(), 1+longestLine/line.Len()) + "\n"
	check(t, []byte(strings.Repeat(text, 4)))
}

func FuzzRead(f *testing.F) {
	for _, example := range examples(f) {
		f.Add(example.Data)
		f.Add(labelled(example.Data, lineLabels["two labels"]))
		f.Add(labelled(example.Data, lineLabels["journal json"]))
		f.Add(wholes["utf-16le"](example.Data))
	}
	for _, document := range documents {
		f.Add([]byte(document.text))
	}
	for _, name := range []string{"gzip", "xz", "zstd"} {
		f.Add(wholes[name]([]byte("CUDA error: out of memory\n")))
	}
	f.Fuzz(func(t *testing.T, text []byte) { check(t, text) })
}

// TestCutAnywhere: a file that is cut, at either end, is read.
func TestCutAnywhere(t *testing.T) {
	stride := 11
	if testing.Short() {
		stride = 53
	}
	for _, f := range examples(t) {
		for i := 0; i < len(f.Data); i += stride {
			check(t, f.Data[i:])
			check(t, f.Data[:i])
		}
	}
}
