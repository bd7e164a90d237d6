//go:build !page

package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"

	"plimsoll/internal/base/fault"
)

// manualCommand returns the hidden command with which packages are made.
func manualCommand() *cobra.Command {
	return &cobra.Command{
		Use: "manual FOLDER", Short: "Write manual pages and completions of shells to a folder", Hidden: true,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, arguments []string) error { return runManual(c.Root(), arguments[0]) },
	}
}

// runManual lays the files out as they lie in share.
func runManual(root *cobra.Command, folder string) error {
	at := func(parts ...string) string { return filepath.Join(append([]string{folder}, parts...)...) }
	for _, name := range []string{at("man", "man1"), at("bash-completion", "completions"), at("zsh", "site-functions"),
		at("fish", "vendor_completions.d")} {
		if err := os.MkdirAll(name, 0o755); err != nil {
			return &fault.Input{What: fmt.Sprintf("%q", folder), Err: errors.Unwrap(err)}
		}
	}
	undated := time.Unix(0, 0) // the same program writes the same pages
	root.DisableAutoGenTag = true
	return errors.Join(
		doc.GenManTree(root, &doc.GenManHeader{Title: "PLIMSOLL", Section: "1", Source: "Plimsoll", Date: &undated},
			at("man", "man1")),
		root.GenBashCompletionFileV2(at("bash-completion", "completions", "plimsoll"), true),
		root.GenZshCompletionFile(at("zsh", "site-functions", "_plimsoll")),
		root.GenFishCompletionFile(at("fish", "vendor_completions.d", "plimsoll.fish"), true),
	)
}
