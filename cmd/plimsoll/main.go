// Command plimsoll says what offloaded optimizer state takes, and carries it.
package main

import "os"

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr)) }
