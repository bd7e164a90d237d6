package samples

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
)

// recording is a recording with every kind of record.
func recording(t testing.TB) ([]*Record, []byte) {
	t.Helper()
	records := []*Record{
		{Start: &Start{Schema: Schema, Version: "1", Began: time.Unix(1, 2).UTC(), Job: "7",
			Host: Host{Name: "a", Memory: ledger.GiB}, Counters: []Counter{{Name: "/proc/vmstat oom_kill"}}}},
		{Time: 1, Mark: &Mark{Rank: 1, PID: 9, Phase: ledger.Forward, Iteration: ledger.First, Source: FromClient,
			Ended: &Ended{Phase: ledger.Load, Resident: 5, FreeHeap: -1,
				Holdings: []ledger.Holding{{Component: ledger.Parameters, Bytes: 4, Why: "2 x 2"}}}}},
		{Time: 2, Sample: &Sample{Processes: []Process{{PID: 9, Rank: 1, Role: RankProcess,
			Resident: Kinds{Anonymous: 1, Shared: 2, File: 3, Hugetlb: 4}, AddressSpaceLimit: -1}},
			Groups: []Group{{Name: "/", Limit: 5}}, GPUs: []GPU{{Processes: []GPUProcess{{PID: 9, Used: -1}}}}}},
		{Time: 3, Output: &Output{Rank: 1, Stream: "stderr", Lines: []string{"Killed", "<&>\u2028"}}},
		{Time: 4, End: &End{ExitCode: 137, Ranks: []RankEnd{{Rank: 1, PID: 9, Signal: 9}}}},
	}
	var text bytes.Buffer
	w := NewWriter(&text)
	for _, r := range records {
		if err := w.Write(r); err != nil {
			t.Fatal(err)
		}
	}
	return records, text.Bytes()
}

// TestRecordingsHaveNoSecrets: what a rank prints goes to whoever gets the recording.
func TestRecordingsHaveNoSecrets(t *testing.T) {
	var text bytes.Buffer
	err := NewWriter(&text).Write(&Record{Output: &Output{Lines: []string{"login with hf_abcdefghijklmnopqrstuvwx"}}})
	if err != nil || !strings.Contains(text.String(), "hf_[redacted]") {
		t.Errorf("%q was written (%v)", &text, err)
	}
}

// TestRecordingIsReadBack reads a recording that ends after every one of its bytes, as when the recorder was killed
// there. All records that were written as a whole come back.
func TestRecordingIsReadBack(t *testing.T) {
	want, text := recording(t)
	for end := 1; end <= len(text); end++ {
		var got []*Record
		cut, err := Read("run.jsonl", bytes.NewReader(text[:end]), func(r *Record) error {
			got = append(got, r)
			return nil
		})
		lines := bytes.Count(text[:end], []byte{'\n'})
		if lines == 0 {
			if !errors.As(err, new(*fault.Input)) {
				t.Fatalf("%d bytes: %v", end, err)
			}
			continue
		}
		if cut != (text[end-1] != '\n') || err != nil {
			t.Fatalf("%d bytes: cut is %v (%v)", end, cut, err)
		}
		if diff := cmp.Diff(want[:lines], got); diff != "" {
			t.Fatalf("%d bytes (-want +got):\n%s", end, diff)
		}
	}
}

func TestBadRecordings(t *testing.T) {
	_, text := recording(t)
	first, _, _ := strings.Cut(string(text), "\n")
	for name, bad := range map[string]struct{ text, want string }{
		"empty":            {"", "run.jsonl:1:1: the recording is empty"},
		"no JSON":          {"{\n", "run.jsonl:1:1: this is no record"},
		"no start":         {`{"time_ns":0,"end":{}}` + "\n", "run.jsonl:1:1: this is no recording"},
		"another schema":   {strings.Replace(first, "samples/1", "samples/9", 1) + "\n", `the schema is "plimsoll.samples/9"`},
		"two starts":       {first + "\n" + first + "\n", "run.jsonl:2:1: this is a second start"},
		"no kind":          {first + "\n{}\n", "run.jsonl:2:1: the record has 0 kinds"},
		"two kinds":        {first + "\n" + `{"end":{},"output":{}}` + "\n", "run.jsonl:2:1: the record has 2 kinds"},
		"before its start": {first + "\n" + `{"time_ns":-1,"end":{}}` + "\n", "run.jsonl:2:1: time_ns is -1"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Read("run.jsonl", strings.NewReader(bad.text), func(*Record) error { return nil })
			if !errors.As(err, new(*fault.Input)) || !strings.Contains(err.Error(), bad.want) {
				t.Errorf("got %v, want %q", err, bad.want)
			}
		})
	}
}

// FuzzRead: a recording that is read says the same when it is written and read again.
func FuzzRead(f *testing.F) {
	_, text := recording(f)
	f.Add(text)
	f.Fuzz(func(t *testing.T, text []byte) {
		read := func(text []byte) (records []*Record, err error) {
			_, err = Read("run.jsonl", bytes.NewReader(text), func(r *Record) error {
				records = append(records, r)
				return nil
			})
			return records, err
		}
		first, err := read(text)
		if err != nil {
			return
		}
		var again bytes.Buffer
		w := NewWriter(&again)
		for _, r := range first {
			if err := w.Write(r); err != nil {
				return // a time that JSON cannot have
			}
		}
		if second, err := read(again.Bytes()); err != nil || len(second) != len(first) {
			t.Errorf("%d records, then %d (%v)", len(first), len(second), err)
		}
	})
}
