// Command controlplane is a Kubernetes control plane for tests and demos in one file: etcd,
// kube-apiserver, kube-controller-manager, kube-scheduler and kubectl. The name that it is called
// with, or its first argument, selects one of them. It changes the behaviour of none, except that
// CONTROLPLANE_EXIT_WITH_STDIN=1 ends the process when its standard input is closed. It is no part of
// what BigFleet ships.
package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllers "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
)

const etcd = "etcd"

var commands = map[string]func() *cobra.Command{
	"kube-apiserver":          apiserver.NewAPIServerCommand,
	"kube-controller-manager": controllers.NewControllerManagerCommand,
	"kube-scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
	"kubectl":                 func() *cobra.Command { return kubectl.NewDefaultKubectlCommand() },
}

func known(name string) bool {
	return name == etcd || commands[name] != nil
}

// exitWithStdin ends the process when the one that started it is gone: the kernel then closes the
// other end of the pipe, however that process ended.
func exitWithStdin() {
	_, _ = io.Copy(io.Discard, os.Stdin)
	fmt.Fprintln(os.Stderr, "controlplane: standard input was closed, so the parent process is gone")
	os.Exit(1)
}

func main() {
	name := filepath.Base(os.Args[0])
	if !known(name) && len(os.Args) > 1 {
		name = os.Args[1]
		os.Args = os.Args[1:]
	}
	if os.Getenv("CONTROLPLANE_EXIT_WITH_STDIN") == "1" {
		go exitWithStdin()
	}
	switch {
	case name == etcd:
		etcdmain.Main(os.Args)
	case known(name):
		os.Exit(cli.Run(commands[name]()))
	default:
		fmt.Fprintln(os.Stderr, "usage: controlplane etcd|kube-apiserver|kube-controller-manager|kube-scheduler|kubectl [argument ...]")
		os.Exit(2)
	}
}
