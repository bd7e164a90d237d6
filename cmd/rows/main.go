// Command rows holds the planner's own model of a job to the program: each job of a table is planned from its files,
// and by the program itself on a GPU that is not there. It writes a table of both.
//
// It needs a Python with PyTorch for CUDA, transformers, accelerate, DeepSpeed and PEFT, and a built plimsoll.
package main

import (
	_ "embed"
	"encoding/json"
	"flag"
	"fmt"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/show/report"
)

//go:embed trainer.py
var trainer []byte

func main() {
	log.SetFlags(0)
	var c command
	flag.StringVar(&c.plimsoll, "plimsoll", "bin/plimsoll", "the program")
	flag.StringVar(&c.python, "python", "python3", "the Python that has the frameworks")
	flag.StringVar(&c.catalog, "catalog", "internal/input/model/catalog", "the `folder` of the models' configurations")
	flag.StringVar(&c.gpu, "gpu", "H200", "the GPU, which should hold every job")
	write := flag.String("write", "", "write the table to a `file`")
	only := flag.String("only", "", "the jobs whose name or model contains this `text`")
	flag.Parse()
	var done []compared
	for _, r := range rows() {
		if *only != "" && !strings.Contains(r.name+" "+r.model, *only) {
			continue
		}
		result := c.compare(r)
		fmt.Println(result)
		done = append(done, result)
	}
	if *write != "" {
		if err := os.WriteFile(*write, []byte(page(done)), 0o644); err != nil {
			log.Fatal(err)
		}
	}
}

// command is how jobs are planned.
type command struct {
	plimsoll, python, catalog, gpu string
}

// compared is a job with its two plans.
type compared struct {
	row
	hand, program peaks
	failed        string
}

// peaks are the most that the GPU of rank 0 holds, in the phases that both plans have.
type peaks struct {
	allocated, reserved ledger.Bytes
	host                ledger.Bytes
}

func (c command) compare(r row) compared {
	result := compared{row: r}
	folder, err := os.MkdirTemp("", "plimsoll-rows-")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(folder)
	result.hand, err = c.plan(append(c.handArguments(r, folder), c.common(r)...))
	if err == nil {
		result.program, err = c.plan(append(c.common(r), c.programArguments(r, folder)...))
	}
	if err != nil {
		result.failed = err.Error()
	}
	return result
}

func (c command) common(r row) []string {
	return []string{"--gpu", c.gpu, "--gpus", strconv.Itoa(max(1, r.gpus))}
}

// write writes a document, and returns its path.
func write(folder, name string, content any) string {
	path := filepath.Join(folder, name)
	text, err := json.Marshal(content)
	if err == nil {
		err = os.MkdirAll(filepath.Dir(path), 0o755)
	}
	if err == nil {
		err = os.WriteFile(path, text, 0o644)
	}
	if err != nil {
		log.Fatal(err)
	}
	return path
}

// handArguments writes the files of a job, and returns what the planner is told of them.
func (c command) handArguments(r row, folder string) []string {
	config, err := os.ReadFile(filepath.Join(c.catalog, r.model+".json"))
	if err != nil {
		log.Fatal(err)
	}
	list := []string{"--model", filepath.Dir(write(folder, "model/config.json", json.RawMessage(config)))}
	arguments := r.arguments
	if r.deepspeed != nil {
		arguments = arguments.with(document{"deepspeed": write(folder, "deepspeed.json", r.deepspeed)})
		list = append(list, "--deepspeed", filepath.Join(folder, "deepspeed.json"))
	}
	if r.accelerate != nil {
		list = append(list, "--accelerate", write(folder, "accelerate.yaml", r.accelerate))
	}
	if r.adapter != nil {
		list = append(list, "--adapter", write(folder, "adapter/adapter_config.json", r.adapter))
	}
	return append(list, "--training-args", write(folder, "arguments.json", arguments),
		"--seq-len", strconv.Itoa(r.sequence), "--torch", "2.15.0", "--transformers", "5.24.0")
}

// programArguments returns the command of the same job.
func (c command) programArguments(r row, folder string) []string {
	path := filepath.Join(folder, "trainer.py")
	if err := os.WriteFile(path, trainer, 0o644); err != nil {
		log.Fatal(err)
	}
	list := []string{"--", c.python}
	switch {
	case r.accelerate != nil:
		list = append(list, "-m", "accelerate.commands.launch", "--config_file",
			filepath.Join(folder, "accelerate.yaml"))
	case r.gpus > 1:
		list = append(list, "-m", "torch.distributed.run", "--nproc_per_node", strconv.Itoa(r.gpus))
	}
	list = append(list, path, "--model", filepath.Join(folder, "model"), "--training-args",
		filepath.Join(folder, "arguments.json"), "--sequence", strconv.Itoa(r.sequence))
	if r.adapter != nil {
		list = append(list, "--adapter", filepath.Join(folder, "adapter"))
	}
	return list
}

// loop are the phases of the training loop.
var loop = []ledger.PhaseName{ledger.Forward, ledger.Backward, ledger.Step}

// plan runs plimsoll plan, and returns the peaks of the training loop. The load of weights that are not here differs.
func (c command) plan(arguments []string) (p peaks, err error) {
	command := exec.Command(c.plimsoll, append([]string{"plan", "--json"}, arguments...)...)
	var said strings.Builder
	command.Stderr = &said
	text, err := command.Output()
	var d report.PlanDocument
	if jsonErr := json.Unmarshal(text, &d); jsonErr != nil {
		lines := strings.Split(strings.TrimSpace(said.String()), "\n")
		return p, fmt.Errorf("%v: %s", err, lines[max(0, len(lines)-2)])
	}
	for _, device := range d.Devices {
		for _, phase := range device.Phases {
			switch {
			case device.Kind == ledger.Host:
				p.host = max(p.host, phase.PeakUsed)
			case device.Rank == 0 && slices.Contains(loop, phase.Name):
				p.allocated, p.reserved = max(p.allocated, phase.PeakAllocated), max(p.reserved, phase.PeakReserved)
			}
		}
	}
	return p, nil
}

// String is the row of the table in a terminal.
func (c compared) String() string {
	if c.failed != "" {
		return fmt.Sprintf("%-30s %-16s %s", c.name, c.model, c.failed)
	}
	return fmt.Sprintf("%-30s %-16s allocated %9v %9v %+6.1f %%  reserved %9v %9v %+6.1f %%  host %9v %9v", c.name,
		c.model, c.hand.allocated, c.program.allocated, apart(c.hand.allocated, c.program.allocated),
		c.hand.reserved, c.program.reserved, apart(c.hand.reserved, c.program.reserved), c.hand.host, c.program.host)
}

// apart returns by how much the planner's own figure is more than the program's, in percent.
func apart(hand, program ledger.Bytes) float64 {
	return 100 * (float64(hand)/float64(program) - 1)
}
