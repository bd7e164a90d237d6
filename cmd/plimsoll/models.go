package main

import (
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/input/gpu"
	"plimsoll/internal/input/model"
	"plimsoll/internal/show/report"
)

// modelsCommand returns the command that lists what is known by name.
func modelsCommand() *cobra.Command {
	var gpus bool
	var format report.Format
	command := &cobra.Command{
		Use:   "models [WORD...]",
		Short: "List the models, or the GPUs, that are known by name",
		Long: `Models lists the models that --model knows by name, with their parameters. With
--gpus it lists the GPUs that --gpu knows, with their memory and bandwidth. With
words, it lists what has all of them in its name or architecture.

A name that is not listed may be a config.json, a folder with one, or a name on
the Hugging Face hub whose files are in the cache of this host.`,
		Example: `  plimsoll models qwen3
  plimsoll models --gpus`,
		RunE: func(c *cobra.Command, words []string) error { return runModels(c, words, gpus, format) },
	}
	command.Flags().BoolVar(&gpus, "gpus", false, "list GPUs")
	outputFlags(command, &format, "print one JSON document")
	return command
}

func runModels(c *cobra.Command, words []string, gpus bool, format report.Format) error {
	var document *report.Catalog
	if gpus {
		found, err := having(words, gpu.Names(), func(name string) string { return name })
		if err != nil {
			return err
		}
		var all []gpu.Model
		for _, name := range found {
			g, err := gpu.Find(name)
			if err != nil {
				return &fault.Internal{Err: err}
			}
			all = append(all, g)
		}
		document = report.NewGPUs(c.Root().Version, all)
	} else {
		architectures := map[string]string{}
		for _, name := range model.Catalog() {
			architecture, err := model.CatalogArchitecture(name)
			if err != nil {
				return &fault.Internal{Err: err}
			}
			architectures[name] = architecture
		}
		found, err := having(words, model.Catalog(), func(name string) string {
			return name + " " + architectures[name]
		})
		if err != nil {
			return err
		}
		var all []*model.Model
		for _, name := range found {
			m, err := model.Load(name)
			if err != nil {
				return &fault.Internal{Err: err}
			}
			all = append(all, m)
		}
		document = report.NewModels(c.Root().Version, all)
	}
	return present(c, document.Page(), format)
}

// joined writes a name as people may: llama3 for Llama-3.
func joined(name string) string {
	return strings.NewReplacer("-", "", "_", "", " ", "").Replace(strings.ToLower(name))
}

// having returns the names whose text has all words, however they are written.
func having(words, names []string, text func(string) string) ([]string, error) {
	found := slices.DeleteFunc(slices.Clone(names), func(name string) bool {
		return slices.ContainsFunc(words, func(word string) bool {
			return !strings.Contains(joined(text(name)), joined(word))
		})
	})
	if len(found) > 0 {
		return found, nil
	}
	e := fault.Inputf("no name has %q", strings.Join(words, " ")).WithHint("leave the words out to see all names")
	if near := fault.Nearest(strings.ToLower(strings.Join(words, "-")), names); near != "" {
		e.Hint = "did you mean " + near + "? " + e.Hint
	}
	return nil, e
}
