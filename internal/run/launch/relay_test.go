//go:build linux

package launch

import (
	"bytes"
	"encoding/json"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"plimsoll/internal/base/samples"
)

// TestRelay prints more than the guard reads: the end of the text arrives, and the relay counts the rest.
func TestRelay(t *testing.T) {
	reader, writer := io.Pipe()
	r := newRelay(writer, func() int { return 7 })
	const pieces = 5000
	piece := bytes.Repeat([]byte("x"), 99)
	out, failed := r.tap(0, "stdout"), r.tap(0, "stderr")
	for i := range pieces {
		if i == pieces-10 {
			_, _ = failed.Write([]byte("error"))
		}
		if n, err := out.Write(append(piece, '\n')); n != 100 || err != nil {
			t.Fatalf("wrote %d, %v", n, err)
		}
	}
	r.tell(message{Ended: &endedRank{samples.RankEnd{Rank: 0, ExitCode: 3}, time.Now()}})
	answered := make(chan error)
	go func() { answered <- r.answer(answer{Result: &Result{ExitCode: 3}}) }()
	sums, kinds := map[string]int{}, ""
	for decoder := json.NewDecoder(reader); ; {
		var m message
		if err := decoder.Decode(&m); err != nil {
			t.Fatal(err)
		}
		switch {
		case m.Printed != nil:
			sums[m.Printed.Stream] += len(m.Printed.Text)
			sums["skipped"] += int(m.Printed.Skipped)
			if !strings.HasSuffix(kinds, "text ") {
				kinds += "text "
			}
		case m.Started != nil && m.Started.PID == 7:
			kinds += "service "
		case m.Ended != nil:
			kinds += "end "
		}
		if m.Answer != nil {
			if m.Answer.Result.ExitCode != 3 {
				t.Errorf("the answer is %+v", m.Answer)
			}
			break
		}
	}
	if err := <-answered; err != nil {
		t.Error(err)
	}
	if all := sums["stdout"] + sums["skipped"]; all != 100*pieces || sums["stderr"] != len("error") ||
		sums["stdout"] < longestText-len("error") {
		t.Errorf("%v of %d", sums, 100*pieces)
	}
	if !strings.Contains(kinds, "text ") || !strings.Contains(kinds, "end ") || !strings.Contains(kinds, "service ") {
		t.Errorf("the messages are %s", kinds)
	}
}

// TestRelayWithoutAGuard: the end of the guard is no error.
func TestRelayWithoutAGuard(t *testing.T) {
	reader, writer := pipeOf(t)
	reader.Close()
	r := newRelay(writer, func() int { return 0 })
	r.printed(0, "stdout", []byte("text"))
	if err := r.answer(answer{}); err != nil {
		t.Error(err)
	}
}

func pipeOf(t *testing.T) (reader, writer *os.File) {
	t.Helper()
	reader, writer, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = writer.Close() })
	return reader, writer
}
