//go:build linux

package watch

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"plimsoll/internal/base/datagram"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/samples"
)

// MarksVariable names the socket of marks to the ranks.
const MarksVariable = "PLIMSOLL_MARKS"

// longestMark is the limit of a datagram.
const longestMark = 64 << 10

// ListenToMarks creates the socket of marks, and its directory.
func ListenToMarks(path string) (*net.UnixConn, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, err
	}
	return datagram.Listen(path)
}

// ReceiveMarks takes marks from a socket until that is closed.
func (r *Recorder) ReceiveMarks(c *net.UnixConn) {
	text, control := make([]byte, longestMark+1), make([]byte, unix.CmsgSpace(unix.SizeofUcred))
	for {
		n, controls, flags, _, err := c.ReadMsgUnix(text, control)
		if err != nil {
			return
		}
		pid := sender(control[:controls])
		err = errors.New("it is longer than 64 KiB")
		if n <= longestMark && flags&unix.MSG_TRUNC == 0 {
			err = r.receive(pid, text[:n])
		}
		if err != nil && r.refused.Add(1) == 1 {
			r.config.Logf("process %d has sent a mark that is none: %v; plimsoll leaves out all such marks", pid, err)
		}
	}
}

// sender returns the PID in the credentials that the kernel has added, or 0.
func sender(control []byte) int {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return 0
	}
	for i := range messages {
		if credentials, err := unix.ParseUnixCredentials(&messages[i]); err == nil {
			return int(credentials.Pid)
		}
	}
	return 0
}

// receive takes the text of a mark.
func (r *Recorder) receive(pid int, text []byte) error {
	m := &samples.Mark{Rank: samples.NoRank}
	if err := json.Unmarshal(text, m); err != nil {
		return err
	}
	if err := checkMark(m); err != nil {
		return err
	}
	m.PID, m.Source = pid, samples.FromClient
	r.lock.Lock()
	defer r.lock.Unlock()
	r.phases.marked(m)
	r.mark(r.now(), m)
	return nil
}

var (
	phaseNames = []ledger.PhaseName{"", ledger.Load, ledger.Initialize, ledger.Forward, ledger.Backward, ledger.Step,
		ledger.Checkpoint}
	iterations = []ledger.Iteration{ledger.Once, ledger.First, ledger.Steady}
)

func checkMark(m *samples.Mark) error {
	switch {
	case m.Rank < 0:
		return fmt.Errorf("rank is %d or missing: expected 0 or more", m.Rank)
	case !slices.Contains(phaseNames, m.Phase):
		return fmt.Errorf("phase is %q", m.Phase)
	case !slices.Contains(iterations, m.Iteration):
		return fmt.Errorf("iteration is %q", m.Iteration)
	case m.Step < 0:
		return fmt.Errorf("step is %d: expected 0 or more", m.Step)
	}
	return nil
}
