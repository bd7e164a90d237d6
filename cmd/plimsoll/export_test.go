//go:build linux

package main

import (
	"encoding/csv"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"golang.org/x/net/html"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/samples"
)

const (
	examplePlan      = "../../examples/recordings/plan.json"
	exampleRecording = "../../examples/recordings/run.jsonl"
)

// exported runs export.
func exported(t *testing.T, arguments ...string) string {
	t.Helper()
	out, err := exec.Command(program(t), append([]string{"export", "--to"}, arguments...)...).Output()
	if err != nil {
		t.Fatalf("%v: %v", arguments, err)
	}
	return string(out)
}

// TestExportProfile has go tool pprof read the profile. At the peak of the plan, parameters are 160.5 MiB.
func TestExportProfile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "run.pb.gz")
	exported(t, "pprof", examplePlan, exampleRecording, "--out", file)
	for _, kind := range []string{"planned", "measured"} {
		out, err := exec.Command("go", "tool", "pprof", "-top", "-sample_index="+kind, file).Output()
		if err != nil {
			t.Fatal(err)
		}
		found := false
		for line := range strings.Lines(string(out)) {
			fields := strings.Fields(line)
			found = found || len(fields) > 5 && fields[0] == "160.53MB" && strings.HasSuffix(line, "  parameters\n")
		}
		if kind == "planned" && !found {
			t.Errorf("there is no line of parameters:\n%s", out)
		}
		if !strings.Contains(string(out), "Python and its libraries") {
			t.Errorf("%s:\n%s", kind, out)
		}
	}
}

func TestExportPrometheus(t *testing.T) {
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(exported(t, "prometheus", examplePlan,
		exampleRecording)))
	if err != nil {
		t.Fatal(err)
	}
	sources := map[string]int{}
	for _, m := range families["plimsoll_peak_bytes"].GetMetric() {
		for _, l := range m.GetLabel() {
			if l.GetName() == "source" {
				sources[l.GetValue()]++
			}
		}
	}
	if sources["planned"] < 5 || sources["measured"] < 5 {
		t.Errorf("peaks: %v", sources)
	}
}

func TestExportCSV(t *testing.T) {
	for _, c := range []struct {
		arguments []string
		column    string
	}{{[]string{exampleRecording}, "bytes"}, {[]string{examplePlan}, "planned_bytes"},
		{[]string{examplePlan, exampleRecording}, "measured_bytes"}} {
		rows, err := csv.NewReader(strings.NewReader(exported(t, append([]string{"csv"}, c.arguments...)...))).ReadAll()
		if err != nil || len(rows) < 10 {
			t.Fatalf("%v: %d rows, %v", c.arguments, len(rows), err)
		}
		column := -1
		for i, title := range rows[0] {
			if title == c.column {
				column = i
			}
		}
		sum := int64(0)
		for _, row := range rows[1:] {
			if n, err := strconv.ParseInt(row[column], 10, 64); err == nil {
				sum += n
			}
		}
		if sum <= 0 {
			t.Errorf("%v: the column %s has %d bytes", c.arguments, c.column, sum)
		}
	}
}

// TestExportHTML has a long recording: the page stays small, and is parsed with its tables and charts.
func TestExportHTML(t *testing.T) {
	file := filepath.Join(t.TempDir(), "long.jsonl")
	opened, err := os.Create(file)
	if err != nil {
		t.Fatal(err)
	}
	w := samples.NewWriter(opened)
	records := []*samples.Record{{Start: &samples.Start{Schema: samples.Schema, Job: "<script>",
		Command: []string{"a&b"}}}}
	for i := range 10_000 {
		held := samples.Kinds{Anonymous: ledger.GiB + ledger.Bytes(i%7)*ledger.MiB}
		if i == 5003 {
			held.Anonymous = 9 * ledger.GiB
		}
		records = append(records, &samples.Record{Time: time.Duration(i) * time.Second, Sample: &samples.Sample{
			Processes: []samples.Process{{PID: 1, Role: samples.RankProcess, Resident: held, Proportional: held}}}})
	}
	for _, r := range records {
		if err := w.Write(r); err != nil {
			t.Fatal(err)
		}
	}
	opened.Close()
	began := time.Now()
	text := exported(t, "html", file)
	if len(text) > 200_000 {
		t.Errorf("the page has %d bytes", len(text))
	}
	if took := time.Since(began); took > 2*time.Minute {
		t.Errorf("it took %v", took)
	}
	if !strings.Contains(text, "up to 9.00 GiB") || strings.Contains(text, "<script>") {
		t.Error("the page lacks the highest sample, or has a script")
	}
	elements := map[string]int{}
	for z := html.NewTokenizer(strings.NewReader(text)); z.Next() != html.ErrorToken; {
		if name, _ := z.TagName(); len(name) > 0 {
			elements[string(name)]++
		}
	}
	if elements["svg"] == 0 || elements["table"] == 0 || elements["polygon"] == 0 || elements["script"] > 0 {
		t.Errorf("elements: %v", elements)
	}
}

// TestExportRefuses what cannot be exported.
func TestExportRefuses(t *testing.T) {
	for want, arguments := range map[string][]string{
		"perfetto needs a recording": {"--to", "perfetto", examplePlan},
		`--to is "gif"`:              {"--to", "gif", exampleRecording},
		"found 0 arguments":          {"--to", "html"},
		"this is no record":          {"--to", "html", "export_test.go"},
	} {
		command := exec.Command(program(t), append([]string{"export"}, arguments...)...)
		out, _ := command.CombinedOutput()
		if command.ProcessState.ExitCode() != exitInput || !strings.Contains(string(out), want) {
			t.Errorf("%v: exit code %d, %s", arguments, command.ProcessState.ExitCode(), out)
		}
	}
}

// TestFactors learns from a run, plans with it, and refuses the factors of another version.
func TestFactors(t *testing.T) {
	file := filepath.Join(t.TempDir(), "factors.json")
	if _, code := compared(t, examplePlan, exampleRecording, "--learn", file, "--tolerance", "25"); code != 0 {
		t.Fatalf("exit code %d", code)
	}
	planned := func(arguments ...string) (assumed string, python ledger.Bytes) {
		out, err := exec.Command(program(t), append([]string{"plan", "--model", "../../examples/recordings/config.json",
			"--cpu", "--precision", "fp32", "--seq-len", "64", "--json", "--factors", file}, arguments...)...).Output()
		if err != nil {
			t.Fatal(err)
		}
		var d struct {
			Assumptions []string
			Devices     []ledger.Device
		}
		if err := json.Unmarshal(out, &d); err != nil {
			t.Fatal(err)
		}
		return strings.Join(d.Assumptions, "\n"), d.Devices[0].Outside[0].Bytes
	}
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var learned struct {
		Constants []struct{ Bytes ledger.Bytes }
	}
	if err := json.Unmarshal(text, &learned); err != nil || len(learned.Constants) != 1 {
		t.Fatalf("%v\n%s", err, text)
	}
	assumed, python := planned()
	if python != learned.Constants[0].Bytes || !strings.Contains(assumed, "learned from "+exampleRecording) {
		t.Errorf("%d bytes, want %+v\n%s", python, learned, assumed)
	}
	assumed, python = planned("--torch", "2.1")
	if python == learned.Constants[0].Bytes || !strings.Contains(assumed, "are not used: they are of torch") {
		t.Errorf("%d bytes\n%s", python, assumed)
	}
}
