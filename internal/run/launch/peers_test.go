//go:build linux

package launch

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"k8s.io/utils/cpuset"

	"plimsoll/internal/machine/host"
)

// peerVariable makes this test's program a rank that does what the value says.
const peerVariable = "PLIMSOLL_TEST_PEER"

// markVariable tells one rank of a test from another.
const markVariable = "PLIMSOLL_TEST_MARK"

// bePeer is the program of a rank. It ends when its input does.
func bePeer(does string) {
	switch does {
	case "bind":
		given, err := host.Affinity(0)
		if err != nil {
			panic(err)
		}
		bindThreads(cpuset.New(given.List()[0]))
	case "look":
		place, err := FindPlacement(os.LookupEnv)
		if err != nil {
			panic(err)
		}
		input := bufio.NewScanner(os.Stdin)
		for s := newPeerSearch(place, os.LookupEnv); input.Scan(); {
			fmt.Println(describe(s.look()))
		}
		return
	}
	fmt.Println("begun")
	_, _ = io.ReadAll(os.Stdin)
}

// describe writes masks and marks of ranks in a line.
func describe(peers []Peer) string {
	words := []string{}
	for _, peer := range peers {
		mark, _ := peer.Environment(markVariable)
		words = append(words, mark+":"+peer.Mask.String())
	}
	return strings.Join(words, " ")
}

// peerProcess is a rank that a test has started.
type peerProcess struct {
	command *exec.Cmd
	input   io.WriteCloser
	output  *bufio.Scanner
}

// startPeer starts a rank that does something. The test is the launcher, or a shell that runs a script with the rank's
// program as $0.
func startPeer(t *testing.T, does, script string, environment ...string) *peerProcess {
	t.Helper()
	p := &peerProcess{command: exec.Command(os.Args[0])}
	if script != "" {
		p.command = exec.Command("sh", "-c", script, os.Args[0])
	}
	p.command.Env = append(append(os.Environ(), peerVariable+"="+does), environment...)
	p.command.Stderr = os.Stderr
	output, err := p.command.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if p.input, err = p.command.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if err := p.command.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.end)
	p.output = bufio.NewScanner(output)
	if does != "look" {
		p.says(t, "begun")
	}
	return p
}

func (p *peerProcess) says(t *testing.T, want string) {
	t.Helper()
	if !p.output.Scan() || p.output.Text() != want {
		t.Errorf("a rank has said %q (%v), want %q", p.output.Text(), p.output.Err(), want)
	}
}

// sees has a rank look once for the others.
func (p *peerProcess) sees(t *testing.T, want string) {
	t.Helper()
	if _, err := io.WriteString(p.input, "look\n"); err != nil {
		t.Fatal(err)
	}
	p.says(t, want)
}

// end ends a rank. It may have ended.
func (p *peerProcess) end() {
	_ = p.input.Close()
	for p.output.Scan() { // until nobody has the output any more
	}
	_ = p.command.Wait()
}

// place returns the variables of a rank of a job with a port.
func place(rank, ranks, port int, mark string) []string {
	return []string{fmt.Sprint("RANK=", rank), fmt.Sprint("LOCAL_RANK=", rank), fmt.Sprint("WORLD_SIZE=", ranks),
		fmt.Sprint("LOCAL_WORLD_SIZE=", ranks), fmt.Sprint("MASTER_PORT=", port), markVariable + "=" + mark}
}

// ownMask is the mask of this process as ranks have it that are not bound.
func ownMask(t *testing.T) string {
	t.Helper()
	mask, err := host.Affinity(0)
	if err != nil {
		t.Fatal(err)
	}
	return mask.String()
}

// TestPeerThatIsBoundAlready: a rank that begins late divides the same masks as one that has bound itself since.
func TestPeerThatIsBoundAlready(t *testing.T) {
	mask := ownMask(t)
	startPeer(t, "bind", "", place(0, 2, 1, "early")...)
	late := startPeer(t, "look", "", place(1, 2, 1, "late")...)
	late.sees(t, "early:"+mask+" late:"+mask)
}

// TestPeersOfAnotherJob starts two jobs by hand from one process. Each finds its own ranks.
func TestPeersOfAnotherJob(t *testing.T) {
	mask := ownMask(t)
	for rank := range 2 {
		startPeer(t, "wait", "", place(rank, 2, 1, "other")...)
	}
	startPeer(t, "wait", "", place(2, 4, 2, "more")...)
	second := startPeer(t, "look", "", place(1, 2, 2, "second")...)
	second.sees(t, "")
	startPeer(t, "wait", "", place(0, 2, 2, "first")...)
	second.sees(t, "first:"+mask+" second:"+mask)
}

// TestPeerThatEndsEarly: a rank that has ended had CPUs all the same.
func TestPeerThatEndsEarly(t *testing.T) {
	mask := ownMask(t)
	first := startPeer(t, "wait", "", place(0, 3, 1, "first")...)
	third := startPeer(t, "look", "", place(2, 3, 1, "third")...)
	third.sees(t, "")
	first.end()
	third.sees(t, "")
	startPeer(t, "wait", "", place(1, 3, 1, "second")...)
	third.sees(t, "first:"+mask+" second:"+mask+" third:"+mask)
}

// TestPeersWithoutLauncher has a shell start each rank and end.
func TestPeersWithoutLauncher(t *testing.T) {
	mask := ownMask(t)
	// The shell has no number of a rank. It ends when it is killed.
	start := func(does string, rank int, mark string) *peerProcess {
		return startPeer(t, does, fmt.Sprintf(`exec 3<&0; LOCAL_RANK=%d "$0" <&3 & kill -STOP $$`, rank),
			slices.DeleteFunc(place(rank, 2, 1, mark), func(v string) bool {
				return strings.HasPrefix(v, "LOCAL_RANK=")
			})...)
	}
	endShell := func(p *peerProcess) {
		if err := p.command.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		if _, err := p.command.Process.Wait(); err != nil {
			t.Fatal(err)
		}
	}
	second := start("look", 1, "second")
	second.sees(t, "")
	endShell(second)
	endShell(start("wait", 0, "first"))
	second.sees(t, "first:"+mask+" second:"+mask)
}
