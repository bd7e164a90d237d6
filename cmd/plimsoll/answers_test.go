//go:build linux

package main

import (
	"encoding/binary"
	"errors"
	"net"
	"os"
	"path/filepath"
	"testing"

	"github.com/go-json-experiment/json"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/state/service/protocol"
)

// A folder of an answer has the packet with which a service answers the first request of a client, and maybe the file
// that goes with it.
const (
	answerPacket = "packet"
	answerFile   = "file"
)

// makeAnswers writes folders of answers: the overview of a service, and what it says to a request to restore.
func makeAnswers(t *testing.T, folder string) {
	t.Helper()
	overview, err := json.Marshal(littleOverview())
	if err != nil {
		t.Fatal(err)
	}
	write := func(name string, p protocol.Packet, status protocol.Status, result, file []byte) {
		t.Helper()
		p.Number, p.Answer = 1, true
		p.Body = append(binary.LittleEndian.AppendUint32(nil, uint32(status)), result...)
		at := filepath.Join(folder, name)
		err := errors.Join(os.Mkdir(at, 0o700), os.WriteFile(filepath.Join(at, answerPacket), p.Encode(), 0o600))
		if file != nil {
			err = errors.Join(err, os.WriteFile(filepath.Join(at, answerFile), file, 0o600))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	write("overview", protocol.Packet{Kind: protocol.Stat}, protocol.Done,
		binary.LittleEndian.AppendUint64(nil, uint64(len(overview))), overview)
	write("refusal", protocol.Packet{Kind: protocol.Restore}, protocol.Refused,
		[]byte("session 1 (job test, rank0/bf16): arena rank0/bf16/step_journal: it is no journal"), nil)
	write("restored", protocol.Packet{Kind: protocol.Restore}, protocol.Done, nil, nil)
}

// littleOverview is the status of a service with a session, a trainer's states and a session that is set aside.
func littleOverview() protocol.Overview {
	measured := ledger.Bytes(4096)
	return protocol.Overview{
		Schema: protocol.StatSchema, Service: "(devel)", Process: 17, Seconds: 3.5, Kernel: "avx512", Job: "test",
		Requests: 12, Refused: 1, Clients: 2, Unanswered: 1, QueuedBytes: 100,
		Sessions: []protocol.SessionStatus{
			{Part: "bf16", Optimizer: "adamw", State: "split", Moments: "fp32", Parameter: "bf16", Gradient: "bf16",
				Elements: 1024, CPUs: []int{0, 1}, Client: 18, Initialized: true, Step: 3, MissesGradients: true,
				SavedStep: 2, StateBytes: 12288, TrafficBytes: 26624, StepsMade: 3, StepSeconds: 0.03,
				LastStepSeconds: 0.01, LastNormSeconds: 0.001},
			{Rank: 1, Part: "states", Holds: "complete", Elements: 1024, StateBytes: 8192, Saving: true},
		},
		SetAside: []protocol.SetAside{{Name: "1", Job: "test", Rank: 2, Part: "bf16", Bytes: 4096,
			Reason: "no journal"}},
		Ledger: ledger.Comparison{
			{Rank: 0, Part: "bf16", Component: ledger.Gradients, Planned: 2048, Measured: &measured},
			{Rank: ledger.WholeNode, Component: ledger.FreeHeap, Measured: &measured},
		},
	}
}

// answering serves a socket until the test ends, and answers every first request with what the folder has then.
func answering(t *testing.T, folder string) (socket string) {
	t.Helper()
	directory, err := os.MkdirTemp("", "plimsoll-test-") // a short path for the socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(directory) })
	socket = filepath.Join(directory, "socket")
	listener, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: socket, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	t.Cleanup(func() {
		_ = listener.Close()
		<-ended
	})
	go func() {
		defer close(ended)
		for {
			c, err := listener.AcceptUnix()
			if err != nil { // the test ends
				return
			}
			answer(c, folder)
			_ = c.Close()
		}
	}()
	return socket
}

// answer answers one request. A packet that cannot be sent is none, and the client finds the connection closed.
func answer(c *net.UnixConn, folder string) {
	_, files, err := protocol.ReadPacket(c, make([]byte, protocol.MaximumPacket))
	protocol.CloseAll(files)
	if err != nil {
		return
	}
	packet, err := os.ReadFile(filepath.Join(folder, answerPacket))
	if err != nil {
		return
	}
	file, err := os.Open(filepath.Join(folder, answerFile))
	if err != nil {
		_ = protocol.WritePacket(c, packet)
		return
	}
	defer file.Close()
	_ = protocol.WritePacket(c, packet, file)
}
