// Command eight-bit compares codes that hold Adam's moments in one byte each. It runs them beside float64 moments, on
// gradients that are hard for such codes, and reports how far they drift. README.md beside this file gives the
// results.
//
//	eight-bit [flags]
//
// It prints the tables and writes results.csv and drift.svg.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
)

func main() {
	if err := run(os.Args[1:], os.Stdout, os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "eight-bit:", err)
		os.Exit(1)
	}
}

func run(args []string, out, progress io.Writer) error {
	flags := flag.NewFlagSet("eight-bit", flag.ContinueOnError)
	steps := flags.Int("steps", 20_000, "steps to simulate; the first fifth does not count")
	blocks := flags.Int("blocks", 4, "blocks of 256 elements")
	directory := flags.String("output", ".", "folder for results.csv and drift.svg")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *steps < 500 || *blocks < 1 || flags.NArg() > 0 {
		return fmt.Errorf("expected at least 500 steps, a block and no arguments; there "+
			"are %d steps, %d blocks and %q", *steps, *blocks, flags.Args())
	}
	var results []result
	for _, beta2 := range []float32{0.999, 0.95} {
		for _, s := range scenarios {
			fmt.Fprintf(progress, "beta2 %g, %s\n", beta2, s.name)
			results = append(results, simulate(s, contestants, *blocks, *steps, beta2, usualSeed)...)
		}
	}
	if err := writeFile(filepath.Join(*directory, "results.csv"), results, writeTable); err != nil {
		return err
	}
	if err := writeFile(filepath.Join(*directory, "drift.svg"), results, writePlot); err != nil {
		return err
	}
	half := len(results) / 2
	return errors.Join(writeSummary(out, results[:half]), writeSummary(out, results[half:]))
}

// writeFile creates the file, calls write and closes the file.
func writeFile(name string, results []result, write func(io.Writer, []result) error) (err error) {
	file, err := os.Create(name)
	if err != nil {
		return err
	}
	defer func() {
		if closed := file.Close(); err == nil {
			err = closed
		}
	}()
	return write(file, results)
}
