// Command rows holds the planner's own model of a job to the program: each job is planned from its files, and by the
// program itself on a GPU that is not there. It writes a table of chosen jobs, or draws jobs at random and records what
// their programs held.
//
// It needs a Python with PyTorch for CUDA, transformers, accelerate, DeepSpeed and PEFT. Drawn jobs also need
// TRL, bitsandbytes and Liger's kernels.
package main

import (
	"flag"
	"fmt"
	"log"
	"os"
	"strings"
)

func main() {
	log.SetFlags(0)
	var c command
	flag.StringVar(&c.python, "python", "python3", "the Python that has the frameworks")
	flag.StringVar(&c.catalog, "catalog", "internal/input/model/catalog", "the `folder` of the models' configurations")
	flag.StringVar(&c.gpu, "gpu", "H200", "the GPU of chosen jobs, which should hold every one of them")
	write := flag.String("write", "", "write the table of chosen jobs to a `file`")
	only := flag.String("only", "", "the jobs whose name or model contains this `text`")
	recorded := flag.String("recorded", "cmd/rows/testdata/drawn.jsonl", "the `file` of drawn jobs")
	seed := flag.Uint64("seed", 0, "draw jobs by this seed, run their programs and record what they hold")
	count := flag.Uint64("count", 100, "the jobs to draw")
	parallel := flag.Int("parallel", 2, "programs that run at a time")
	show := flag.Bool("show", false, "show the drawn jobs, and run none")
	detail := flag.Bool("detail", false, "show the components of recorded jobs, by both plans")
	flag.StringVar(&c.snapshot, "snapshot", "", "with -detail, keep the history of the GPU's memory in a `file`")
	score := flag.Bool("score", false, "hold the planner to what was recorded")
	unseen := flag.String("unseen", "", "with -score, keep first figures as those of a `commit`")
	flag.Parse()
	c.chosen = func(r row) bool { return *only == "" || strings.Contains(r.Name+" "+r.Model, *only) }
	switch {
	case *score:
		c.score(*recorded, *unseen, *seed)
	case *detail:
		c.detail(*recorded)
	case *show:
		c.show(*seed, *count)
	case *seed > 0:
		c.record(*recorded, *seed, *count, *parallel)
	default:
		c.table(*write, *recorded)
	}
}

// table plans the chosen jobs in both ways.
func (c command) table(path, drawn string) {
	var done []compared
	for _, r := range rows() {
		if c.chosen(r) {
			result := c.compare(r)
			fmt.Println(result)
			done = append(done, result)
		}
	}
	if path != "" {
		list, err := readRecorded(drawn)
		if err != nil {
			log.Fatal(err)
		}
		c.chosen = func(row) bool { return true }
		if err := os.WriteFile(path, []byte(page(done, c.outcomes(list))), 0o644); err != nil {
			log.Fatal(err)
		}
	}
}
