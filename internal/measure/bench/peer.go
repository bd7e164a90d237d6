//go:build linux

package bench

import (
	"bufio"
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/state/engine"
)

// The peers: torch.optim, and DeepSpeed's optimizer for offloading.
const (
	PeerTorch     = "torch"
	PeerDeepSpeed = "deepspeed"
)

// Peers returns the names of the peers. Each is the name of a Python module.
func Peers() []string { return []string{PeerTorch, PeerDeepSpeed} }

// peerOptimizer is the optimizer that is compared with a peer.
const peerOptimizer = "adamw"

// PythonVariable names a Python interpreter that has the peer. It takes precedence over any other.
const PythonVariable = "PLIMSOLL_PYTHON"

//go:embed peer.py
var peerScript string

// Peer is a peer's description of itself, and the times of its steps.
type Peer struct {
	Name     string        `json:"-"`
	Version  string        `json:"version"`
	Variants []PeerVariant `json:"variants"`
}

// PeerVariant is one implementation of the AdamW step.
type PeerVariant struct {
	Name string `json:"name"` // key of Sample.Peer
	// WholeStep reports whether the step includes the norm of the gradients and the bf16 copy, as our whole step
	// does. Otherwise it is the update alone.
	WholeStep bool `json:"whole_step"`
	// Extra is the most memory that the process held beside its tensors.
	Extra ledger.Bytes `json:"extra_bytes"`
}

func (r Request) checkPeer(names []string) error {
	switch {
	case r.Peer == "":
		return nil
	case !slices.Contains(Peers(), r.Peer):
		return fault.Inputf("--peer is %q: expected %s", r.Peer, strings.Join(Peers(), " or "))
	case !slices.Contains(names, peerOptimizer):
		return fault.Inputf("--peer %s measures AdamW, but --optimizer is %s", r.Peer, r.Optimizer).
			WithHint("--optimizer " + peerOptimizer)
	}
	return nil
}

// The memory of a peer per parameter: parameter, gradient and two moments in fp32, a bf16 copy, and temporaries of up
// to three fp32 tensors.
const (
	peerTensorBytes = 18
	peerExtraBytes  = 12
	peerBaseBytes   = 800 * ledger.MiB // the libraries and their threads
)

func (c Case) peerBytes() ledger.Bytes {
	if c.Peer == "" {
		return 0
	}
	return ledger.Bytes(len(c.Shards))*peerBaseBytes + ledger.Bytes(c.Held*(peerTensorBytes+peerExtraBytes))
}

// FindPython tries the interpreter that the environment names, or else the project's own and then python3. It returns
// the first that has a module, or "", and all that it has tried.
func FindPython(module string) (found string, tried []string) {
	tried = []string{os.Getenv(PythonVariable)}
	if tried[0] == "" {
		tried = []string{"python3"}
		if cache, err := os.UserCacheDir(); err == nil {
			tried = []string{filepath.Join(cache, "plimsoll", "venv", "bin", "python"), "python3"}
		}
	}
	for _, python := range tried {
		// Looking for a module takes no time; importing it takes seconds.
		const find = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
		if exec.Command(python, "-c", find, module).Run() == nil {
			return python, tried
		}
	}
	return "", tried
}

func findPeer(peer string) (string, error) {
	python, tried := FindPython(peer)
	if python == "" {
		return "", fault.Inputf("--peer %[1]s: no interpreter has %[1]s; tried %[2]s", peer,
			strings.Join(tried, ", ")).
			WithHint(fmt.Sprintf("python3 -m pip install %s, or set %s to an interpreter that has it", peer,
				PythonVariable))
	}
	return python, nil
}

// peerProcesses are one process for each rank on this host.
type peerProcesses []*peerProcess

// startPeers starts them one after the other, as the first may build a kernel. The caller closes them, even after an
// error.
func startPeers(ctx context.Context, python string, c Case) (peerProcesses, error) {
	var all peerProcesses
	for _, rank := range c.Shards {
		p, err := startPeer(ctx, python, c.Peer, rank)
		if err != nil {
			return all, err
		}
		all = append(all, p)
	}
	return all, nil
}

func (all peerProcesses) ids() []int {
	var ids []int
	for _, p := range all {
		ids = append(ids, p.command.Process.Pid)
	}
	return ids
}

// round makes one step of each variant. All ranks make it at the same time, and it takes as long as the slowest.
func (all peerProcesses) round() (map[string]float64, error) {
	seconds := map[string]float64{}
	for i, v := range all[0].found.Variants {
		for _, p := range all {
			if _, err := io.WriteString(p.stdin, v.Name+"\n"); err != nil {
				return nil, fmt.Errorf("%s: %w", p.found.Name, err)
			}
		}
		for _, p := range all {
			took, err := p.answer(&p.found.Variants[i])
			if err != nil {
				return nil, err
			}
			seconds[v.Name] = max(seconds[v.Name], took)
		}
	}
	// OpenMP threads spin for some milliseconds before they sleep.
	time.Sleep(20 * time.Millisecond)
	return seconds, nil
}

// found returns what the processes said of themselves. The extra memory is that of all.
func (all peerProcesses) found() *Peer {
	whole := all[0].found
	whole.Variants = slices.Clone(whole.Variants)
	for _, p := range all[1:] {
		for i, v := range p.found.Variants {
			whole.Variants[i].Extra += v.Extra
		}
	}
	return &whole
}

// peerProcess is a Python process that makes one step for each line that it
// reads.
type peerProcess struct {
	command *exec.Cmd
	stdin   io.WriteCloser
	answers *bufio.Reader
	stderr  bytes.Buffer
	found   Peer
}

func startPeer(ctx context.Context, python, name string, rank engine.ShardConfig) (*peerProcess, error) {
	request, err := json.Marshal(map[string]any{"peer": name, "elements": rank.Elements, "cpus": rank.CPUs})
	if err != nil {
		return nil, err
	}
	p := &peerProcess{command: exec.CommandContext(ctx, python, "-c", peerScript, string(request)),
		found: Peer{Name: name}}
	p.command.Stderr = &p.stderr
	if p.stdin, err = p.command.StdinPipe(); err != nil {
		return nil, err
	}
	stdout, err := p.command.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p.answers = bufio.NewReader(stdout)
	if err := p.command.Start(); err != nil {
		return nil, err
	}
	if err := p.read(&p.found); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return p, nil
}

// answer reads the time of a step of a variant.
func (p *peerProcess) answer(v *PeerVariant) (seconds float64, err error) {
	var answer struct {
		Seconds float64      `json:"seconds"`
		Extra   ledger.Bytes `json:"extra_bytes"`
	}
	err = p.read(&answer)
	v.Extra = max(v.Extra, answer.Extra)
	return answer.Seconds, err
}

// read reads one line of JSON.
func (p *peerProcess) read(into any) error {
	line, err := p.answers.ReadBytes('\n')
	if err == nil {
		err = json.Unmarshal(line, into)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", p.found.Name, err)
	}
	return nil
}

// Close closes the input of the process, which then ends.
func (p *peerProcess) Close() error {
	err := p.stdin.Close()
	if failed := p.command.Wait(); failed != nil {
		lines := strings.Split(strings.TrimSpace(p.stderr.String()), "\n")
		err = errors.Join(err, fmt.Errorf("%s: %w: %s", p.found.Name, failed, lines[len(lines)-1]))
	}
	return err
}
