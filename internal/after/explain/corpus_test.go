package explain

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf16"

	"golang.org/x/tools/txtar"

	"plimsoll/internal/after/evidence"
	"plimsoll/internal/base/ledger"
)

// showHeld is a variable of the environment. Where it is set, TestCorpus also shows what is wrong in the held half.
const showHeld = "PLIMSOLL_SHOW_HELD"

// TestCorpus explains every case of testdata/corpus, whose README.md says what a case is and when it is right. A
// wrong answer is allowed now and then; an answer that is sure and wrong is not.
func TestCorpus(t *testing.T) {
	table := fmt.Sprintf("%-5s %6s %6s %6s %14s\n", "set", "cases", "right", "wrong", "sure and wrong")
	for _, half := range []string{"open", "held", "fresh"} {
		files, err := filepath.Glob(filepath.Join("testdata", "corpus", half, "*.txtar"))
		if err != nil || len(files) < 60 {
			t.Fatalf("%d cases in %s, expected 60 or more (%v)", len(files), half, err)
		}
		right, sure := 0, 0
		for _, file := range files {
			faults, isSure := judgeCase(t, file)
			if isSure {
				sure++
			}
			if len(faults) == 0 {
				right++
			} else if half != "held" || os.Getenv(showHeld) != "" {
				t.Logf("%s: %s", file, strings.Join(faults, "; "))
			}
		}
		table += fmt.Sprintf("%-5s %6d %6d %6d %14d\n", half, len(files), right, len(files)-right, sure)
		if 100*right < 95*len(files) || sure > 0 {
			t.Errorf("of %d cases in %s %d are right, expected 95 %%, and %d sure and wrong, expected none", len(files),
				half, right, sure)
		}
	}
	t.Logf("\n%s", table)
}

// expectation is what an honest reader says of a case.
type expectation struct {
	Resource  Resource         `json:"resource"`
	Also      []Resource       `json:"also_right"`
	Rank      expected[int]    `json:"rank"`
	Phase     expected[string] `json:"phase"`
	AtMost    Confidence       `json:"confidence_at_most"`
	Uncertain bool             `json:"must_not_be_certain"`
	Detail    string           `json:"detail"`
	Says      []string         `json:"says"`
	ExitCode  int              `json:"exit_code"`
	Source    string           `json:"source"`
}

// expected is a value that may be null, and that is not judged where its key is missing.
type expected[T comparable] struct {
	judged bool
	value  *T
}

func (e *expected[T]) UnmarshalJSON(text []byte) error {
	e.judged = true
	return json.Unmarshal(text, &e.value)
}

// differs says how a value differs from the expected one, or is empty.
func (e expected[T]) differs(name string, got *T) string {
	show := func(v *T) string {
		if v == nil {
			return "null"
		}
		return fmt.Sprint(*v)
	}
	if !e.judged || show(got) == show(e.value) {
		return ""
	}
	return fmt.Sprintf("%s is %s, expected %s", name, show(got), show(e.value))
}

// judgeCase explains the files of a case. It returns what is wrong with the answer, and whether the answer is sure and
// wrong.
func judgeCase(t *testing.T, file string) (faults []string, sure bool) {
	t.Helper()
	archive, err := txtar.ParseFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var want expectation
	making := map[string]recipe{}
	var in Inputs
	for _, f := range archive.Files {
		var into any
		switch f.Name {
		case "expect.json":
			into = &want
		case "make.json":
			into = &making
		default:
			continue
		}
		decoder := json.NewDecoder(bytes.NewReader(f.Data))
		decoder.DisallowUnknownFields()
		if err := decoder.Decode(into); err != nil {
			t.Fatalf("%s: %s: %v", file, f.Name, err)
		}
	}
	if want.Source == "" {
		t.Fatalf("%s: the expectation lacks its source", file)
	}
	want.AtMost = cmp.Or(want.AtMost, Certain)
	for _, f := range archive.Files {
		if f.Name == "expect.json" || f.Name == "make.json" {
			continue
		}
		source, err := evidence.Read(f.Name, bytes.NewReader(making[f.Name].make(f.Data)))
		if err != nil {
			return []string{fmt.Sprintf("%s is not read: %v", f.Name, err)}, false
		}
		in.Sources = append(in.Sources, source)
	}
	return want.judge(Explain(in))
}

// certainty orders the degrees of confidence.
var certainty = []Confidence{Unknown, Likely, Certain}

// details are the words for what tells causes of one resource apart.
var details = map[string]*regexp.Regexp{
	"fragmentation": regexp.MustCompile(`(?i)fragment`),
	"capacity":      regexp.MustCompile(`(?i)capacity|too large|all of its memory|full|holds? more|needs? more`),
	"fraction":      regexp.MustCompile(`(?i)fraction`),
	"neighbour":     regexp.MustCompile(`(?i)neighbou?r|(an)?other process`),
	"non_pytorch":   regexp.MustCompile(`(?i)non[-_ ]?pytorch|outside (of )?PyTorch|beside PyTorch`),
	"pinned":        regexp.MustCompile(`(?i)pinn`),
	"quota":         regexp.MustCompile(`(?i)quota`),
}

// judge compares an answer with the expectation.
func (want *expectation) judge(got *Explanation) (faults []string, sure bool) {
	wrongResource := got.Cause.Resource != want.Resource && !slices.Contains(want.Also, got.Cause.Resource)
	if wrongResource {
		faults = append(faults, fmt.Sprintf("the resource is %q, expected %q", got.Cause.Resource, want.Resource))
	}
	if slices.Index(certainty, got.Confidence) > slices.Index(certainty, want.AtMost) {
		faults = append(faults, fmt.Sprintf("the confidence is %s, expected %s at most", got.Confidence, want.AtMost))
	}
	sure = got.Confidence == Certain && (wrongResource || want.Uncertain)
	if wrongResource {
		return append(faults, got.Cause.Text), sure
	}
	var phase *string
	if got.Cause.Phase != nil {
		name := string(ledger.PhaseName(*got.Cause.Phase))
		phase = &name
	}
	for _, difference := range []string{want.Rank.differs("rank", got.Cause.Rank), want.Phase.differs("phase", phase)} {
		if difference != "" {
			faults = append(faults, difference)
		}
	}
	if want.Detail != "" && !details[want.Detail].MatchString(got.Cause.Detail+" "+got.Cause.Text) {
		faults = append(faults, fmt.Sprintf("neither %q nor %q says %s", got.Cause.Detail, got.Cause.Text, want.Detail))
	}
	for _, text := range want.Says {
		if !slices.ContainsFunc(got.Evidence, func(e Evidence) bool { return cites(e, text) }) {
			faults = append(faults, fmt.Sprintf("no evidence quotes %q", text))
		}
	}
	if code := 5; want.ExitCode >= 0 {
		if got.Cause.Resource == None {
			code = 0
		}
		if code != want.ExitCode {
			faults = append(faults, fmt.Sprintf("the exit code is %d, expected %d", code, want.ExitCode))
		}
	}
	return faults, sure
}

// cites reports whether an evidence has one of the texts that a bar separates.
func cites(e Evidence, texts string) bool {
	return slices.ContainsFunc(strings.Split(texts, "|"), func(text string) bool {
		return strings.Contains(e.Text, text) || strings.Contains(e.Says, text)
	})
}

// recipe says how the file of a case is made of its text. Its zero value leaves the text as it is.
type recipe struct {
	NoiseBefore int    `json:"noise_before"`
	NoiseAfter  int    `json:"noise_after"`
	Noise       string `json:"noise"`
	Label       string `json:"label"`
	Colour      bool   `json:"colour"`
	Progress    bool   `json:"progress"`
	JSONLines   string `json:"json_lines"`
	CRLF        bool   `json:"crlf"`
	CutFront    int    `json:"cut_front"`
	CutBack     int    `json:"cut_back"`
	Encoding    string `json:"encoding"`
	GZip        bool   `json:"gzip"`
}

func (r recipe) make(text []byte) []byte {
	var lines []string
	for i := range r.NoiseBefore {
		lines = append(lines, r.noise(i))
	}
	for line := range strings.Lines(string(text)) {
		lines = append(lines, strings.TrimSuffix(line, "\n"))
	}
	for i := range r.NoiseAfter {
		lines = append(lines, r.noise(r.NoiseBefore+i))
	}
	end := "\n"
	if r.CRLF {
		end = "\r\n"
	}
	var made strings.Builder
	for i, line := range lines {
		made.WriteString(r.dress(i, line) + end)
	}
	out := []byte(made.String())
	out = out[r.CutFront : len(out)-r.CutBack]
	if r.GZip {
		var packed bytes.Buffer
		writer := gzip.NewWriter(&packed)
		_, writeErr := writer.Write(r.encode(out))
		if err := errors.Join(writeErr, writer.Close()); err != nil {
			panic(err) // a buffer takes all
		}
		return packed.Bytes()
	}
	return r.encode(out)
}

// noise is a line that says nothing of a failure.
func (r recipe) noise(i int) string {
	switch r.Noise {
	case "agent":
		return fmt.Sprintf("node-agent[812]: heartbeat %d: 3 services are up", i)
	case "kernel":
		return fmt.Sprintf("[%6d.%06d] usb 1-%d: new high-speed USB device number %d using xhci_hcd", i/9, i, i%7, i%99)
	}
	return fmt.Sprintf("step %d: loss %.4f, grad norm %.3f, 1.07 s", i, 9/(1+float64(i)/5e3), 1+float64(i%17)/10)
}

// dress is a line as a terminal, a launcher or a container runtime shows it.
func (r recipe) dress(i int, line string) string {
	if r.Colour {
		line = "\x1b[1;31m" + line + "\x1b[0m"
	}
	if r.Progress {
		line = fmt.Sprintf("%3d%%|##        | %d/1000 [00:11<00:51]\r", i%100, i) + line
	}
	line = r.Label + line
	if r.JSONLines == "" {
		return line
	}
	record := map[string]string{"log": line + "\n", "stream": "stderr", "time": "2026-03-01T10:12:01.5Z"}
	if r.JSONLines == "structured" {
		record = map[string]string{"level": "info", "message": line, "timestamp": "2026-03-01T10:12:01.5Z"}
	}
	text, err := json.Marshal(record)
	if err != nil {
		panic(err) // strings can be marshalled
	}
	return string(text)
}

func (r recipe) encode(text []byte) []byte {
	var order binary.AppendByteOrder
	switch r.Encoding {
	case "":
		return text
	case "utf-8-bom":
		return append([]byte("\xef\xbb\xbf"), text...)
	case "utf-16le":
		order = binary.LittleEndian
	case "utf-16be":
		order = binary.BigEndian
	default:
		panic("no such encoding: " + r.Encoding)
	}
	var out []byte
	for _, unit := range utf16.Encode(append([]rune{'\ufeff'}, []rune(string(text))...)) {
		out = order.AppendUint16(out, unit)
	}
	return out
}

// TestCorpusIsWhole: make.json has only files and keys that exist, and every set has cases of every resource.
func TestCorpusIsWhole(t *testing.T) {
	counts := map[string]map[Resource]int{"open": {}, "held": {}, "fresh": {}}
	for half, found := range counts {
		files, _ := filepath.Glob(filepath.Join("testdata", "corpus", half, "*.txtar"))
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			archive := txtar.Parse(text)
			if len(archive.Files) < 2 || len(bytes.TrimSpace(archive.Comment)) == 0 {
				t.Errorf("%s has no files or no comment", file)
			}
			for _, f := range archive.Files {
				var want expectation
				if f.Name == "expect.json" && json.Unmarshal(f.Data, &want) == nil {
					found[want.Resource]++
				}
			}
		}
		for _, resource := range []Resource{GPU, Host, CGroup, SharedMemory, LockedMemory, NUMANode, Disk, Processes,
			NotMemory, None, Undetermined} {
			if found[resource] == 0 {
				t.Errorf("%s has no case of %q", half, resource)
			}
		}
	}
}
