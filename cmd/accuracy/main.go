// Command accuracy compares plans with public measurements. It expresses every measured training run as a user would,
// plans it, and compares the figures. The report, docs/accuracy.md, describes the method.
//
//	accuracy [flags] [measurements.jsonl]
package main

import (
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
)

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "accuracy:", err)
		os.Exit(1)
	}
}

func run(args []string, out io.Writer) error {
	flags := flag.NewFlagSet("accuracy", flag.ContinueOnError)
	check := flags.String("check", "", "fail if this `file` is not the report of these measurements")
	document := flags.String("write", "",
		"also write the report to this `file`, in Markdown, and the first scores beside it")
	list := flags.String("table", "", "also write the figures with their sources to this `file`, for package published")
	detail := flags.Bool("detail", false, "show every quantity, and the command line of every row")
	keep := flags.String("keep", "", "`folder` for the files that the rows are expressed in; without, they are removed")
	golden := flags.String("megatron", "", "compare with a `file` of Megatron-LM's golden values instead")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *golden != "" {
		rows, err := planGolden(*golden)
		if err != nil {
			return err
		}
		c := compareMegatron(rows, out)
		fmt.Fprintf(os.Stderr, "inside of their intervals: %v of allocated, %v of max_allocated\n", c.allocated, c.most)
		return nil
	}
	file := flags.Arg(0)
	if file == "" {
		shared := os.Getenv("PLIMSOLL_SHARED")
		if shared == "" {
			shared = filepath.Join("..", "shared")
		}
		file = filepath.Join(shared, "data", "measurements-dev.jsonl")
	}
	rows, err := readRows(memoryRows)
	if err != nil {
		return err
	}
	folder := *keep
	if folder == "" {
		if folder, err = os.MkdirTemp("", "accuracy"); err != nil {
			return err
		}
		defer os.RemoveAll(folder)
	}
	results := compareAll(rows, folder)
	megatronRuns, err := planGolden(file)
	if err != nil {
		return err
	}
	steps, err := readSteps(stepRows)
	if err != nil {
		return err
	}
	all := page{results: results, golden: megatronRuns, steps: predictSteps(steps, filepath.Join(folder, "steps"))}
	writeTable(out, results)
	writeMissing(out, results)
	writeSummary(out, results)
	if *detail {
		writeDetail(out, results)
	}
	if *list != "" {
		if err := os.WriteFile(*list, tableOf(results), 0o644); err != nil {
			return err
		}
	}
	if *check != "" {
		return checkDocument(*check, all)
	}
	if *document == "" {
		return nil
	}
	return all.write(*document)
}
